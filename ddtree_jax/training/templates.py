"""Tables from which `prompts.py` writes training prompts: everyday instructions and word problems.

A template is text with slots. `{topic}` draws from the bank of that name and keeps its value for
the rest of the prompt; digits after a name (`{name1}`, `{name2}`) ask for different draws from one
bank. A drawn phrase may hold slots itself. Numbers are declared before a bar, as
`a:2-9 b:10-90-5 | text` (lowest, highest, step), shown as `{a}`, and combined as `{=a*b}`, so that
problems come out even.
"""

import random
import re

_SLOT = re.compile(r"\{(=?)([^{}\s\"':,]+)\}")
_NUMBER = re.compile(r"(\w+):(\d+)-(\d+)(?:-(\d+))?")


def fill(template: str, rng: random.Random) -> str:
    """Write one prompt from a template, with the draws of `rng`."""
    declared, bar, text = template.partition(" | ")
    values: dict[str, object] = {}
    if bar:
        for name, low, high, step in _NUMBER.findall(declared):
            values[name] = rng.randrange(int(low), int(high) + 1, int(step or 1))
    else:
        text = template
    written = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", _expand(text, values, rng))
    return written[0].upper() + written[1:]


def _expand(text: str, values: dict[str, object], rng: random.Random) -> str:
    def slot(match: re.Match[str]) -> str:
        computed, name = match.groups()
        if computed:
            return str(eval(name, {"__builtins__": {}}, values))  # our own constants
        if name not in values:
            taken = set(map(str, values.values()))
            bank = BANKS[name.rstrip("0123456789")]
            values[name] = rng.choice([item for item in bank if item not in taken] or bank)
        return _expand(str(values[name]), values, rng)

    return _SLOT.sub(slot, text)


def instruction(rng: random.Random) -> str:
    """One everyday instruction: a category, then a template, at times a wish on style."""
    text = fill(rng.choice(INSTRUCTIONS[rng.choice(_CATEGORIES)]), rng)
    if "\n" not in text and rng.random() < 0.3:
        text += " " + fill(rng.choice(WISHES), rng)
    return text


def word_problem(rng: random.Random) -> str:
    """One problem in several steps, with its question last."""
    return fill(rng.choice(WORD_PROBLEMS), rng)


def _bank(text: str) -> list[str]:
    """Items between bars; line breaks are only there for the reader of this file."""
    return [item.strip() for item in " ".join(text.split()).split("|") if item.strip()]


def _numbered(text: str) -> list[str]:
    """Templates that declare numbers: each starts at a line with a declaration."""
    return [" ".join(item.split()) for item in re.split(r"\n(?=\s*a:\d)", text) if item.strip()]


BANKS = {
    "name": _bank("""
        Aisha|Ben|Carla|Dmitri|Elena|Farid|Grace|Hugo|Ingrid|Jamal|Keiko|Liam|Maria|
        Noah|Olga|Pedro|Quinn|Rosa|Samir|Tara|Uma|Victor|Wendy|Xavier|Yara|Zoe|Amir|
        Bella|Carlos|Diana|Ethan|Fiona|George|Hannah|Isaac|Julia|Kevin|Lena|Marcus|
        Nina|Oscar|Priya|Rafael|Sofia|Theo|Vera|Will|Anika"""),
    "thing": _bank("""
        apples|pencils|stickers|marbles|books|cookies|stamps|postcards|buttons|shells|
        oranges|candles|toy cars|beads|muffins|crayons|coins|badges|eggs|notebooks|
        balloons|roses|cupcakes|keychains"""),
    "box": _bank("boxes|bags|baskets|crates|jars|packets|shelves|trays"),
    "shop": _bank("""
        bakery|bookstore|toy shop|grocery store|garden center|hardware store|cafe|market
        stall"""),
    "color": _bank("red|blue|green|yellow|white|purple|orange|black"),
    "animal": _bank("""
        dolphin|elephant|octopus|honeybee|wolf|penguin|owl|sea turtle|fox|spider|camel|
        bat|hummingbird|giraffe|crocodile|ant|salmon|horse|kangaroo|polar bear|squirrel|
        raven|frog|cat|dog"""),
    "food": _bank("""
        sourdough bread|vegetable curry|tomato soup|chocolate cake|fried rice|lentil stew|
        pancakes|mushroom risotto|apple pie|guacamole|roast chicken|pizza dough|hummus|
        banana muffins|miso soup|spaghetti with garlic|bean tacos|Greek salad|dumplings|
        pumpkin soup|omelettes|ramen"""),
    "place": _bank("""
        Lisbon|Kyoto|Cairo|Iceland|New Zealand|Barcelona|Vancouver|Nairobi|Rome|Bangkok|
        Peru|Edinburgh|Istanbul|Chicago|Vietnam|Norway|Morocco|Buenos Aires|Seoul|the
        Scottish Highlands|Prague|New Orleans|Sydney|Mexico City|Singapore|the Swiss Alps|
        Athens|Mumbai|Copenhagen|Costa Rica"""),
    "job": _bank("""
        software engineer|nurse|high school teacher|graphic designer|chef|electrician|data
        analyst|journalist|architect|veterinarian|project manager|librarian|pharmacist|
        firefighter|marketing manager|accountant|park ranger|civil engineer|translator|
        biologist|photographer|social worker|carpenter|flight attendant|customer support
        agent|research assistant"""),
    "person": _bank("""
        my landlord|a coworker|my manager|a close friend|my neighbor|a customer|a professor|
        a new team member|my grandmother|the school principal|a hotel|a local newspaper|a job
        recruiter|my book club|an old classmate|the city council|a supplier|my sister|a
        mentor|a client"""),
    "occasion": _bank("""
        moving a meeting to next week|a delayed delivery|a broken heating system|a birthday
        party on Saturday|thanking them for their help|asking for a deadline extension|declining
        an invitation politely|a lost suitcase|reporting a billing mistake|a charity run|asking
        for a letter of recommendation|a noisy construction site|sharing project results|
        planning a weekend trip|an upcoming vacation|applying for a summer internship|a refund
        request|congratulating them on a promotion|a change of address|organizing a potluck
        dinner"""),
    "tone": _bank("""
        formal|friendly|short|polite|funny|enthusiastic|persuasive|heartfelt|professional|
        cheerful|apologetic|poetic|simple|confident|warm|dramatic|witty|calm"""),
    "theme": _bank("""
        a lighthouse keeper|the first snow of winter|a robot learning to paint|lost keys|an old
        bookshop|a rainy afternoon|two rival bakers|a message in a bottle|a city without
        clocks|a garden on the moon|a train that never stops|a forgotten song|a dragon afraid
        of fire|the last day of school|a secret door|a stray {animal}|a mountain village|a
        time traveler's regret|a talking {animal}|a missing painting|autumn leaves|a night
        market in {place}|growing old|the sea|a {job} with an unusual hobby|a letter that
        arrives late|friendship|an empty theater|hope|a storm"""),
    "genre": _bank("""
        science fiction|mystery|fairy tale|adventure|horror|romance|fantasy|historical|
        comedy|detective|western|coming-of-age"""),
    "form": _bank("""
        poem|haiku|limerick|short story|sonnet|song|fable|monologue|dialogue|diary entry|
        free-verse poem|bedtime story|opening paragraph for a novel|six-line rhyme"""),
    "text": _bank("""
        blog post|product description|social media post|press release|cover letter|speech|
        newsletter introduction|opinion article|movie review|advertisement|travel guide|book
        review|podcast script|event announcement|tutorial|one-page essay|radio advert"""),
    "everyday": _bank("""
        healthy eating on a budget|working from home|learning a new language|better sleep|
        saving money|public speaking|houseplants|running a first 5k|reducing plastic waste|
        time management|adopting a {animal}|moving to {place}|job interviews|making friends as
        an adult|home composting|stress before exams|cooking {food}|electric cars|social media
        habits|volunteering|screen time|remote teamwork|starting a small business|learning the
        guitar|bicycle repair|night photography|becoming a {job}|camping with children|reading
        more books|saving energy at home|good posture|keeping a journal|minimalism|online
        privacy|public transport|city gardening|board games|chess"""),
    "stem": _bank("""
        photosynthesis|gravity|the water cycle|plate tectonics|DNA replication|black holes|
        vaccines|electric motors|entropy|semiconductors|natural selection|the greenhouse
        effect|lasers|quantum entanglement|antibiotic resistance|neural networks|nuclear
        fusion|the periodic table|osmosis|the Doppler effect|enzymes|tides|superconductivity|
        the immune system|batteries|lightning|cell division|special relativity|the nitrogen
        cycle|public-key cryptography|solar panels|sound waves|acids and bases|the human
        heart|radioactive decay|blockchain|the ozone layer|Newton's laws of motion|stem cells|
        dark matter|catalysts|the carbon cycle|bridges|jet engines|GPS|magnetism|
        fermentation|optical fibers|mitosis and meiosis|the Coriolis effect|protein folding|
        earthquakes|refrigerators"""),
    "humanities": _bank("""
        the Industrial Revolution|the Renaissance|the French Revolution|Stoicism|the Silk Road|
        ancient Athens|utilitarianism|the Cold War|Shakespeare's tragedies|the Roman Republic|
        the printing press|impressionism|the Great Depression|existentialism|inflation|the
        Ottoman Empire|free will|supply and demand|jazz|women's suffrage|the Enlightenment|
        Greek mythology|globalization|Buddhism|the Space Race|the Magna Carta|the Black Death|
        Gothic architecture|colonialism|monetary policy|the Harlem Renaissance|social contract
        theory|minimum wage laws|the Meiji Restoration|feudalism|the Abolitionist movement|
        surrealism|opportunity cost|human rights|the Aztec Empire|romantic poetry"""),
    "pair": _bank("""
        cats and dogs|tea and coffee|renting and buying a home|Python and JavaScript|SQL and
        NoSQL|cities and villages|trains and airplanes|mitosis and meiosis|stocks and bonds|
        TCP and UDP|printed books and e-books|solar and wind power|viruses and bacteria|lists
        and tuples in Python|democracy and monarchy|processes and threads|freelancing and a
        full-time job|yoga and pilates|speed and velocity|stacks and queues|novels and short
        stories|Rust and C++|jogging and swimming|renewable and fossil energy|correlation and
        causation|fiscal and monetary policy|REST and GraphQL|abstract classes and interfaces|
        public and private schools|gas and electric stoves|metals and nonmetals"""),
    "figure": _bank("""
        Marie Curie|Leonardo da Vinci|Nelson Mandela|Ada Lovelace|Aristotle|Cleopatra|Albert
        Einstein|Mahatma Gandhi|Jane Austen|Galileo Galilei|Frida Kahlo|Charles Darwin|
        Confucius|Amelia Earhart|Nikola Tesla|Florence Nightingale|Mozart|Abraham Lincoln|
        Rosa Parks|Isaac Newton"""),
    "role": _bank("""
        a travel guide in {place}|a friendly {job}|a pirate captain|a personal trainer|a wise
        old {animal}|a museum curator|a job interviewer hiring a {job}|a nutritionist|{figure}|
        a medieval knight|a detective in the 1920s|a stand-up comedian|a life coach|a sports
        commentator|a ship's computer|a debate coach|a grumpy librarian|a history teacher|a
        wine critic|a financial advisor|a robot butler|a space station commander|a fortune
        teller|an English teacher|a news anchor|a chess grandmaster"""),
    "audience": _bank("""
        a five-year-old|a beginner|a high school student|a busy manager|my grandfather|a class
        of ten-year-olds|a college freshman|someone with no background|a new employee|a curious
        teenager"""),
    "language": _bank("""
        Python|JavaScript|Java|C++|Go|Rust|TypeScript|C|Ruby|C#|Kotlin|Swift|PHP|Bash"""),
    "task": _bank("""
        reverses a linked list|merges two sorted arrays|checks whether two words are anagrams|
        finds the longest run of equal numbers|parses a CSV line|counts word frequencies in a
        text|performs binary search|implements bubble sort|implements quicksort|validates an
        email address|computes the nth triangular number|converts Celsius to Fahrenheit|finds
        the second largest number|removes duplicates while keeping order|rotates an array by k
        steps|implements a stack with a minimum|generates a random password|computes the
        Levenshtein distance|traverses a binary tree level by level|finds all permutations of a
        string|checks if a binary tree is balanced|flattens a nested list|reads a file and
        prints every line with its number|calculates compound interest|transposes a matrix|finds
        the shortest path in an unweighted graph|implements an LRU cache|groups people by age|
        solves the N-queens problem|compresses a string with run-length encoding|sums the
        diagonal of a matrix|simulates rolling two dice|converts a number to binary|finds the
        missing number from 1 to n|detects a cycle in a linked list|implements a queue using two
        stacks|formats a duration in seconds|splits a list into chunks of size n|capitalizes
        every word of a sentence|draws a pyramid of stars"""),
    "concept": _bank("""
        recursion|closures|pointers|garbage collection|hash tables|dependency injection|list
        comprehensions|decorators|race conditions|unit testing|inheritance|version control
        with Git|big O notation|async and await|regular expressions|generators|database
        indexes|dynamic programming|exceptions|type hints|immutability|memoization|the
        model-view-controller pattern|static typing|binary search trees|HTTP cookies|Docker
        containers|continuous integration|interfaces|SQL joins"""),
    "table": _bank("""
        employees(id, name, salary, department)|orders(id, customer, total, day)|books(id, title,
        author, year)|students(id, name, grade, city)|products(id, name, price, stock)"""),
    "query": _bank("""
        the five rows with the highest value|the number of rows per group|the average by group|
        all rows whose name starts with A|duplicates|the newest entry of every group|a running
        total"""),
    "app": _bank("""
        a to-do list|a weather dashboard|a tic-tac-toe game|a URL shortener|a chat server|a
        budget tracker|a recipe book|a quiz game|a library catalog|a parking garage|a bank
        account|a vending machine|a playlist manager|a contact book|an elevator|an online
        shop|a flashcard trainer"""),
    "opinion": _bank("""
        school uniforms|a four-day work week|free public transport|homework in primary school|
        banning cars from city centers|universal basic income|nuclear power|mandatory voting|
        zoos|remote learning|artificial intelligence in medicine|space tourism|longer school
        holidays|cash payments"""),
    "count": _bank("three|four|five|six|seven|eight|ten"),
    "days": _bank("two|three|four|five|seven|ten"),
    "adjective": _bank("""
        happy|important|beautiful|quick|difficult|interesting|small|strange|quiet|brave|
        clear|bright"""),
    "product": _bank("""
        wireless headphones|a coffee machine|a hiking backpack|a desk lamp|running shoes|an
        electric bike|a smart watch|a blender|a camping tent|a standing desk|a garden hose|a
        rice cooker"""),
    "good": _bank("""
        easy to set up|very sturdy|beautifully designed|quiet|light to carry|worth the price|
        surprisingly fast|comfortable all day|simple to clean|well packaged"""),
    "bad": _bank("""
        the battery ran out quickly|the manual was confusing|one part arrived broken|the color
        faded after a month|it is too heavy|customer service never answered|the buttons feel
        cheap|it stopped working after {a1} weeks|the price went up|it does not fit on my shelf"""),
    "a": [str(n) for n in range(2, 31)],
    "price": [f"${n}" for n in range(12, 400, 7)],
    "weekday": _bank("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"),
    "month": _bank("""
        January|February|March|April|May|June|July|August|September|October|November|
        December"""),
    "year": [str(n) for n in range(1850, 2020, 3)],
    "company": _bank("""
        Northwind Foods|Bluepeak Labs|Harbor Textiles|Greenfield Energy|Lumen Books|Atlas
        Cargo"""),
    "passage": _bank("""
        I bought {product} in {month}. It is {good1} and {good2}, but {bad}. {name} recommended it
        to me, and overall I would give it {a2} points out of 30.| {company} announced on {weekday}
        that it will open a new office in {place} next {month}. According to its director, {name1},
        about {a1}0 people will work there. {name2}, who leads the {job} team, said that hiring
        starts immediately.| Minutes, {weekday}: {name1} presented the budget of {price1}00.
        {name2} asked for a new {job} and {name3} agreed to write the plan by {month} {a1}. The
        team will discuss {everyday} next time.| {name1} was born in {place1} in {year}. After
        training as a {job}, {name1} moved to {place2} and worked there for {a1} years. A book on
        {humanities} made {name1} known to a wider public.| {name1} ordered {a1} {thing1} for
        {price1}, {name2} ordered {a2} {thing2} for {price2}, and {name3} ordered {a3} {thing3} for
        {price3}. All parcels leave the {shop} on {weekday}.| The {animal1} lives longer than many
        people think. Researchers from {place} followed {a1} animals over {a2} years and found that
        sleep, food and company all matter. The lead author, {name}, warns that the results may not
        hold for the {animal2}.| The workshop on {stem} takes place on {month} {a1} in room {a2}.
        It costs {price} and is led by {name1}, a {job} from {place}. Please register with {name2}
        before {weekday}.| Our trip to {place} began badly: the train was {a1} minutes late and
        {name1} forgot the tickets. Still, we ate {food}, met a {job} who showed us the old town,
        and came home happy on {weekday}."""),
}

WISHES = _bank("""
        Keep it under {count} sentences.|Use bullet points.|Give an example.|Explain your
        reasoning.|Keep it brief.|Write for {audience}.|Use simple words.|Be specific.|Include
        a short conclusion.|Think step by step.|Use a {tone} tone.|Answer in one paragraph.|Add
        a title.|Include {count} examples.|Avoid technical terms.|Finish with a question.""")

INSTRUCTIONS = {
    "writing": _bank("""
        Write a {tone} email to {person} about {occasion}.|Write a {form} about {theme}.|Write a
        {genre} {form} about {theme}.|Write a {tone} {text} about {everyday}.|Can you write a
        {tone} message to {person} about {occasion}?|Compose a {form} in which {theme} meets
        {theme2}.|Write a {tone} toast for {name}, who is a {job}.|Write the opening scene of a
        {genre} film about {theme}, set in {place}.|Describe {place} in the {month} rain to
        someone who has never been there.|Suggest {count} titles for a {genre} novel about
        {theme}.|Write a {tone} {text} for {product}.|Write a dialogue between {name1} and
        {name2} about {everyday}.|Write a {count}-stanza poem about the {animal} and the
        {animal2}.|Write a short story that starts with: "{name} had never believed in {theme}."|
        Rewrite this sentence so that it sounds more {tone}: "{name} wants to talk about
        {occasion}."|Create a {tone} slogan for a {shop} in {place}.|Write a letter from a {job}
        in {year} to a friend in {place}."""),
    "roleplay": _bank("""
        Pretend to be {role}. Introduce yourself and talk about {everyday}.|You are {role}. What
        do you think about {stem}?|Act as {role} and give me advice on {everyday}.|Imagine you
        are {role}. Describe a typical {weekday}.|You are {role}. Explain {humanities} to me.|
        Play the part of {role} and answer this: how should I prepare for {everyday}?|I want you
        to act as {role}. My first question is: what would you tell {person} about {everyday}?|
        Suppose {figure} could visit {place} today. What would they say about {everyday}?|You are
        {role} and {name} just asked you for help with {occasion}. What do you say?|Stay in
        character as {role} and tell me a story about {theme}."""),
    "reasoning": [
        *_bank("""
        {name1} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest?|
        If all {thing1} in the shop are {color1} and this is not {color1}, can it be one of the
        {thing1}? Explain.|{name1} sits to the left of {name2}. {name3} sits to the right of
        {name2}. Who sits in the middle?|Would you rather be a {animal1} or a {animal2}? Argue for
        one of them.|What would happen if {stem} did not exist?|What could go wrong when {name}
        tries {everyday}?|Which one does not belong: {animal1}, {animal2}, {color}, {animal3}?
        Why?|Is the following argument valid? Every {job} likes {food}. {name} likes {food}. So
        {name} is a {job}.|Give arguments for and against {opinion}.|Do you agree with {opinion}?
        Give {count} reasons.|{name1} says that {name2} is lying. {name2} says that {name3} is
        lying. Can all of them be right?|Every {weekday}, {name} eats {food}. Today {name} eats
        {food}. Does it have to be {weekday}?"""),
        *_numbered("""
    a:2-8 b:2-9 | Yesterday was {weekday}. What day will it be in {=a+b} days?
    a:3-9 b:2-6 | {name} has {a} brothers and {b} sisters. How many children are in the family?
    a:2-9 | A {animal} climbs {=a+2} meters each day and slides back {a} meters each night. How
        long does it need for a wall of {=4*a} meters?"""),
    ],
    "math": [
        *_numbered("""
    a:2-19 b:3-40 c:2-19 | Solve for x: {a}x + {b} = {=a*c+b}.
    a:5-95-5 b:20-900-20 | What is {a}% of {b}? Show your work.
    a:2-30 b:2-30 | Find the area and the perimeter of a rectangle with sides {a} cm and {b}
        cm.
    a:2-12 b:2-12 c:1-20 | Evaluate f(x) = {a}x^2 - {b}x + {c} at x = {count}.
    a:11-99 b:11-99 | What is {a} times {b}? Explain how to compute it without a calculator.
    a:1-9 b:1-9 | Factor the quadratic x^2 + {=a+b}x + {=a*b}.
    a:2-9 b:2-9 c:2-9 d:2-9 | Solve the system: {a}x + y = {=a*c+d} and x + {b}y = {=c+b*d}.
    a:2-9 b:2-9 | Simplify the expression {a}(x + {b}) - {b}(x - {a}).
    a:3-12 b:2-9 | A bag holds {a} {color1} and {b} {color2} marbles. What is the probability
        of drawing a {color1} one? And of drawing two in a row without putting the first back?
    a:2-9 b:2-7 | What are the next three terms of the sequence {a}, {=a+b}, {=a+2*b},
        {=a+3*b}?
    a:3-20 | Find the volume of a cylinder with radius {a} and height {count}.
    a:2-12 b:13-40 | Compute the mean, the median and the range of {a}, {b}, {=a+b}, {=b-a},
        {=2*a}.
    a:2-9 b:2-9 | Find the derivative of {a}x^{b} + {b}x.
    a:2-9 b:11-30 c:2-5 | Add {a}/{b} and {c}/{=b+1}.
    a:1-9 b:1-9 c:10-20 d:10-20 | Find the slope of the line through ({a}, {b}) and ({c}, {d}).
    a:3-9 b:10-90-10 | If {a} workers need {b} days for a job, how many days do {=2*a} workers
        need?"""),
        "Explain the difference between the mean and the median to {audience}.",
    ],
    "coding": _bank("""
        Write a {language} function that {task}.|Write a {language} program that {task}.|How do I
        write {language} code that {task1}? Add comments.|Explain {concept} to {audience}.|
        Implement {app} in {language}.|What does {concept} mean? Show an example in {language}.|
        Write a Python class for {app}, with docstrings.|Design the data model for {app}.|Write unit
        tests for a {language} function that {task}.|When should I use {concept}?|Given the table
        {table}, write a SQL query that finds {query}.|What are common mistakes with {concept} in
        {language}?|Translate a loop that {task} into idiomatic {language}.|Compare two ways to
        write a {language} function that {task}. Which one is faster?|Write a Python script that
        {task1} and then {task2}.|Sketch a REST API for {app}.|Write a regular expression that
        matches {adjective} dates like {month} {a}, {year}, and explain it.|What is the time
        complexity of code that {task}? Write it in {language}.|Write an HTML page with a form for
        {app}.|Explain step by step how a program {task}."""),
    "extraction": [
        task + "\n\n{passage}"
        for task in _bank("""
        List every person named in this text.|Extract all names, places and numbers from the text
        below as JSON.|Summarize this text in one sentence.|Turn the following text into a
        table.|Which places and dates are mentioned here?|Rate the mood of this text from 1 to 5
        and explain why.|Write {count} questions about this text.|Find the main point of the
        following paragraph.|Rewrite this text in the {tone} style.|Extract the key facts as
        bullet points.|Rewrite the passage in the present tense.|What can be concluded from this
        text, and what cannot?|Write a headline for this text.|Who does what in the following
        text? Answer as a numbered list.|Shorten this text by half.""")
    ]
    + _bank("""
        Sort these words alphabetically: {animal1}, {food1}, {color1}, {animal2}, {thing1}.|
        Classify each word as animal, food or color: {animal1}, {color1}, {food1}, {animal2},
        {color2}.|Give {count} synonyms for "{adjective}" and use each in a sentence.|Extract the
        city and the month: "{name} visited {place} in {month} {year}."|Write the opposite of each
        word: {adjective1}, {adjective2}, {adjective3}."""),
    "stem": _bank("""
        Explain {stem} to {audience}.|How does {stem} work?|What is {stem} and why does it
        matter?|What are {count} common misconceptions about {stem}?|Describe an experiment that
        shows {stem}.|How are {stem1} and {stem2} related?|Who discovered the science behind
        {stem}, and how?|Write a quiz of {count} questions about {stem}, with answers.|Explain
        how a {animal} survives in the wild.|Give an everyday example of {stem}.|What are open
        questions about {stem}?|What is the role of {stem} in industry?|Write a short lesson plan
        on {stem} for {audience}.|Summarize the history of {stem} in {count} sentences.|Explain
        the difference between {pair}.|Why does the {animal} behave the way it does in {month}?"""),
    "humanities": _bank("""
        Explain {humanities} to {audience}.|What caused {humanities}?|What were the effects of
        {humanities} on everyday life?|Compare {humanities} and {humanities2}.|Write a short
        essay about {humanities}.|Who was {figure}, and why are they remembered?|What might
        {figure} say about {humanities}?|Name {count} important facts about {humanities}.|How did
        {humanities} change {place}?|Discuss {count} works of art connected with {humanities}.|
        What can we learn today from {humanities}?|Make a timeline of {humanities} with {count}
        entries.|Write a discussion question about {humanities} and answer it.|What do critics
        say about {opinion}?|What did {figure} and {figure2} have in common?|How is {humanities}
        taught to {audience}?"""),
    "everyday": _bank("""
        Give me {count} tips for {everyday}.|What are the pros and cons of {everyday}?|Plan a
        {days}-day trip to {place} for {person}.|How do I get started with {everyday}?|Write a
        recipe for {food}.|What can I cook with {food1} left over from yesterday?|Compare
        {pair}.|Make a weekly schedule for {everyday}.|List
        {count} ideas for {everyday} in {month}.|I feel stuck with {everyday}. What should I do?|
        Make a packing list for {days} days in {place} in {month}.|Suggest {count} gifts for a
        {job}.|What should I know before {everyday}?|Explain to {audience} why {everyday} is
        worth the effort.|Create a checklist for {occasion}.|Help me decide between {everyday}
        and {everyday2}.|What questions should I expect in an interview for a {job}?|How can a
        {job} get better at {everyday}?|What is a typical day like for a {job} in {place}?|Name
        {count} games for a party with {a} guests.|My friend {name} is worried about {occasion}.
        How can I help?|Tell me a fun fact about the {animal}.|What is the best way to apologize
        to {person}?|Write a motivational speech about {everyday}."""),
}
_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "coding", "extraction", "stem",
               "humanities", "everyday", "everyday")  # fmt: skip

WORD_PROBLEMS = _numbered("""
    a:3-12 b:4-20 c:2-12 | {name} has {a} {box} with {b} {thing} in each. After giving away {c}
        {thing}, how many {thing} are left?
    a:2-9 b:3-15 c:2-9 d:3-15 | A {shop} sells {thing1} for ${a} each and {thing2} for ${c}
        each. {name} buys {b} {thing1} and {d} {thing2}. How much does {name} pay in total?
    a:10-40 b:2-5 c:3-20 | {name1} has {a} {thing}. {name2} has {b} times as many, and {name3}
        has {c} fewer than {name2}. How many {thing} do the three have together?
    a:20-90-10 b:2-6 c:10-80-10 | {name} drives at {a} miles per hour for {b} hours and then
        covers another {c} miles. How far does {name} drive altogether?
    a:8-25 b:4-8 c:3-6 d:20-90-5 | {name} earns ${a} per hour and works {b} hours a day, {c}
        days a week. Each week {name} spends ${d} on the bus. How much is left after one week?
    a:10-60-10 b:40-400-20 | A {shop} has {b} {thing}. On {weekday}, {a}% of them are sold. How
        many {thing} remain?
    a:3-9 b:2-8 c:1-9 | {name} reads {a} pages on {weekday1}, {b} times as many on {weekday2},
        and {c} more than that on {weekday3}. How many pages does {name} read in those three days?
    a:3-9 b:4-12 | {name} wants to share {=a*b} {thing} equally among {a} friends. Then one
        more friend arrives and brings {b} {thing}. How many {thing} does everyone get if they
        share all of them again?
    a:2-9 b:10-40 c:2-5 | A recipe for {food} needs {a} cups of flour for {c} people. How many
        cups are needed for {=c*b} people?
    a:40-80-5 b:10-50-10 c:5-30-5 | A jacket costs ${=a*2}. It is reduced by {b}%, and {name}
        also has a coupon for ${c}. What does {name} pay?
    a:4-15 b:3-12 | {name1} is {a} years old. In {b} years, {name2} will be twice as old as
        {name1} will be then. How old is {name2} now?
    a:6-20 b:2-9 c:2-7 | A farmer has {a} cows and {b} times as many chickens. Each chicken
        lays {c} eggs a week. How many eggs are there after four weeks?
    a:3-12 b:5-20 c:2-9 | A garden is {=a+b} meters long and {a} meters wide. A fence costs
        ${c} per meter. How much does it cost to fence the garden?
    a:30-95-5 b:30-95-5 c:30-95-5 | {name} scored {a}, {b} and {c} on three tests. What score
        on the fourth test gives an average of {=(a+b+c)//3}?
    a:12-60-12 b:2-9 c:5-25-5 | {thing} cost ${b} a dozen. {name} buys {a} {thing} and pays
        with ${=b*a//12+c}. How much change does {name} get?
    a:2-8 b:15-60-15 c:3-6 | {name} practices the piano for {b} minutes every day and {=a*10}
        minutes more on {weekday}. How many hours is that in {c} weeks?
    a:100-900-50 b:5-40-5 c:3-9 | {name} has saved ${a} and adds ${b} every week. How much will
        there be after {c} weeks, and how many weeks until there is ${=a+b*c*2}?
    a:3-9 b:2-6 c:20-60-4 | There are {c} {thing} in a box. One quarter are {color1}, {a} are
        {color2} and the rest are {color3}. How many are {color3}?
    a:200-900-100 b:3-12 c:2-6 | A tank holds {a} liters. It loses {b} liters an hour and gains
        {c} liters an hour. How much water is in the full tank after {count} hours?
    a:2-7 b:4-15 c:3-19 | {name1} and {name2} fold paper birds. {name1} folds {a} a minute
        and {name2} folds {=a+1} a minute. After {b} minutes {c} of them get wet. How many are
        still dry?
    a:3-10 b:6-30-6 c:2-5 | A {shop} opens for {a} hours a day and serves {b} customers per
        hour. One customer in {c} buys {thing}. About how many customers buy {thing} in a day?
    a:10-50 b:10-50 c:2-9 | On {weekday1} {name} sold {=a+b} {thing}, on {weekday2} {b}, and on
        {weekday3} {c} times as many as on {weekday2}. How many more {thing} were sold on
        {weekday3} than on {weekday1}?
    a:3-9 b:2-9 c:2-9 | A train has {a} cars with {=b*10} seats each. {=c*5} seats are empty.
        How many passengers are on the train?
    a:4-20-2 b:3-9 | {name} cuts a rope of {=a*b} meters into {b} equal pieces and uses half of
        one piece. How many meters of rope does {name} still have?
    a:10-20 b:1-9 c:2-9 | A class has {=a*2} students. Half of them are in the choir, {b} play
        the violin only, and the others do neither. How many do neither if {c} more students join
        and do neither?
    a:15-60-5 b:2-9 c:10-40-10 | A phone plan costs ${a} a month plus ${b} for each gigabyte
        above {c}. {name} uses {=c+b} gigabytes. How much is the bill?
    a:2-6 b:3-9 c:2-5 | Each of the {a} shelves in the {shop} holds {b} {box}, and each of
        these holds {c} {thing}. A truck brings {=a*b} more {thing}. How many {thing} are there
        now?
    a:60-240-20 b:2-4 c:5-30-5 | A pool is filled by two pipes in {a} minutes together. The
        first brings {c} liters a minute and the second {b} times as much. How many liters does the
        pool hold?
    a:2-9 b:10-90-10 c:3-6 | {name1} walks {a} kilometers to school and back every day, {c}
        days a week. {name2} bikes {b} kilometers a week. Who covers more, and by how much?
    a:3-15 b:2-12 | The sum of two numbers is {=2*a+b} and their difference is {b}. What are
        the two numbers?
    a:4-12 b:2-6 c:3-11 | {name} plants {a} rows of {b} tomato plants and as many rows of {c}
        bean plants. A rabbit eats {count} plants. How many plants survive?
    a:20-60-10 b:2-8 c:100-400-20 | {name} needs ${c} for {product}. {name} has ${a} and earns
        ${b} for every lawn. How many lawns must {name} mow?
    a:40-90-5 b:2-3 c:15-45-15 | A bus leaves at {b} o'clock and drives {a} miles in one hour,
        then stops for {c} minutes and drives another {a} miles at the same speed. When does it
        arrive?
    a:2-20 b:2-20 | {name1} paints a fence in {a} hours and {name2} does it in {=a+b} hours.
        How long do they need together?
    a:5-30-5 b:200-900-100 c:2-4 | {name} puts ${b} in a bank at {a}% simple interest a year.
        How much money is there after {c} years?
    a:3-9 b:2-9 c:2-9 | For every {a} {color1} {thing} there are {b} {color2} {thing}. There
        are {=a*c} {color1} ones. How many {thing} are there in all?""")
