"""Python function stubs in the style of code benchmarks, written from tables of our own.

A stub is a signature with a docstring for the model to complete. Either it comes from a row of
`_ROWS`, or it is a pipeline: choose elements, change them, and combine them, which gives a thousand
tasks from three short lists. The examples in a docstring are computed from the expression of the
task, so they are always true.
"""

import random
import re
import textwrap
from itertools import combinations, groupby
from os.path import commonprefix

# A task: names ; kinds of the arguments ; type of the result ; what it does ; its result as an
# expression over the arguments x and y. Long tasks go on in indented lines.
_ROWS = """
count_digits digit_count ; text ; int ; Count the characters of {x} that are digits. ;
    sum(c.isdigit() for c in x)
swap_ends exchange_ends ; ints ; list[int] ; Return {x} with its first and last element exchanged. ;
    x[-1:]+x[1:-1]+x[:1]
alternating_sum signed_sum ; ints ; int ; Add the elements at even indices and subtract the others.
    ; sum(x[::2])-sum(x[1::2])
range_width spread ; ints ; int ; Return the difference between the largest and smallest element. ;
    max(x)-min(x)
is_leap_year leap_year ; year ; bool ; Return True if the year {x} is a leap year. ; x%4==0 and
    (x%100!=0 or x%400==0)
count_words word_count ; text ; int ; Return how many words separated by spaces {x} has. ;
    len(x.split())
longest_word_length max_word_length ; text ; int ; Return the length of the longest word in {x}. ;
    max(map(len,x.split()))
initials make_initials ; text ; str ; Return the first letters of the words in {x}, in upper case. ;
    ''.join(w[0] for w in x.split()).upper()
reverse_words words_backwards ; text ; str ; Return the words of {x} in the opposite order. ; '
    '.join(x.split()[::-1])
title_words capitalize_words ; text ; str ; Capitalize every word of {x}. ; ' '.join(w.capitalize()
    for w in x.split())
letter_frequency char_counts ; word ; dict[str, int] ; Return how often each letter occurs in {x}. ;
    {c:x.count(c) for c in sorted(set(x))}
run_lengths compress ; word ; list[tuple[str, int]] ; Return the runs of equal letters in {x} with
    their lengths. ; [(k,len(list(g))) for k,g in groupby(x)]
is_anagram are_anagrams ; word word ; bool ; Check whether {x} and {y} use the same letters equally
    often. ; sorted(x)==sorted(y)
hamming_distance count_mismatches ; word word ; int ; Count the positions at which {x} and {y}
    differ. ; sum(a!=b for a,b in zip(x,y))
shared_letters letters_in_both ; word word ; list[str] ; Return the sorted letters that occur in
    both {x} and {y}. ; sorted(set(x)&set(y))
common_start shared_prefix ; word word ; str ; Return the longest prefix that {x} and {y} have in
    common. ; commonprefix([x,y])
interleave merge_letters ; word word ; str ; Take letters from {x} and {y} in turn, as long as both
    last. ; ''.join(a+b for a,b in zip(x,y))
repeat_letters stretch ; word small ; str ; Repeat every letter of {x} {y} times. ; ''.join(c*y for
    c in x)
rotate_left shift_left ; ints small ; list[int] ; Rotate {x} to the left by {y} places. ;
    x[y%len(x):]+x[:y%len(x)]
chunks split_into_chunks ; ints small ; list[list[int]] ; Cut {x} into pieces of length {y}; the
    last may be shorter. ; [x[i:i+y] for i in range(0,len(x),y)]
every_nth take_every ; ints small ; list[int] ; Return every {y}-th element of {x}, beginning with
    the first. ; x[::y]
top_n largest_values ; ints small ; list[int] ; Return the {y} largest elements of {x}, largest
    first. ; sorted(x)[::-1][:y]
moving_average sliding_mean ; ints small ; list[float] ; Return the mean of each window of {y}
    neighbors. ; [round(sum(x[i:i+y])/y,2) for i in range(len(x)-y+1)]
running_total cumulative_sums ; ints ; list[int] ; Return the sums of the first 1, 2, 3, ...
    elements of {x}. ; [sum(x[:i+1]) for i in range(len(x))]
differences steps_between ; ints ; list[int] ; Return the difference of each element of {x} to the
    one before. ; [b-a for a,b in zip(x,x[1:])]
count_increases rises ; ints ; int ; Count how often an element of {x} is larger than the one
    before. ; sum(b>a for a,b in zip(x,x[1:]))
second_smallest runner_up ; ints ; int ; Return the second smallest distinct element of {x}. ;
    sorted(set(x))[1]
local_peaks find_peaks ; ints ; list[int] ; Return the inner elements that are larger than both
    neighbors. ; [x[i] for i in range(1,len(x)-1) if x[i-1]<x[i]>x[i+1]]
index_of_maximum argmax ; ints ; int ; Return the index of the first largest element. ;
    x.index(max(x))
partition split_by ; ints int ; tuple[list[int], list[int]] ; Split {x} into elements below {y} and
    the others. ; ([v for v in x if v<y],[v for v in x if v>=y])
clamp_all clip_values ; ints int ; list[int] ; Replace every element of {x} that exceeds {y} with
    {y}. ; [min(v,y) for v in x]
pairs_with_sum count_pairs ; ints int ; int ; Count the pairs of positions in {x} whose elements add
    up to {y}. ; sum(a+b==y for a,b in combinations(x,2))
dot_product inner_product ; ints ints ; int ; Return the sum of the products of matching elements. ;
    sum(a*b for a,b in zip(x,y))
elementwise_max larger_of_each ; ints ints ; list[int] ; Return the larger of each pair of matching
    elements. ; [max(a,b) for a,b in zip(x,y)]
merge_sorted merge_lists ; ints ints ; list[int] ; Return all elements of {x} and {y} as one sorted
    list. ; sorted(x+y)
missing_from only_in_first ; ints ints ; list[int] ; Return the elements of {x} that are not in {y}.
    ; [v for v in x if v not in y]
zip_to_pairs pair_up ; ints ints ; list[tuple[int, int]] ; Pair matching elements of {x} and {y}. ;
    list(zip(x,y))
sum_of_multiples add_multiples ; int small ; int ; Return the sum of the multiples of {y} from 1 to
    {x}. ; sum(range(y,x+1,y))
count_divisors number_of_divisors ; int ; int ; Return how many positive integers divide {x}. ;
    sum(x%d==0 for d in range(1,x+1))
proper_divisors divisors_below ; int ; list[int] ; Return the divisors of {x} except {x} itself. ;
    [d for d in range(1,x) if x%d==0]
is_perfect_square square_check ; int ; bool ; Return True if {x} is the square of an integer. ;
    round(x**.5)**2==x
triangular_number triangle_sum ; int ; int ; Return the number of dots in a triangle with {x} rows.
    ; x*(x+1)//2
count_ones ones_in_binary ; int ; int ; Return how many ones the binary form of {x} has. ;
    bin(x).count('1')
reverse_digits flip_number ; int ; int ; Return the number with the digits of {x} in reverse order.
    ; int(str(x)[::-1])
multiplication_row times_table ; int small ; list[int] ; Return the first {y} multiples of {x}. ;
    [x*i for i in range(1,y+1)]
countdown count_down ; small ; list[int] ; Return the numbers from {x} down to 0. ;
    list(range(x,-1,-1))
powers_of first_powers ; small small ; list[int] ; Return {x} to the powers 0, 1, ..., {y}. ; [x**i
    for i in range(y+1)]
seconds_to_clock format_seconds ; year ; str ; Write {x} seconds as minutes:seconds with two digits
    each. ; f'{x//60:02d}:{x%60:02d}'
celsius_to_fahrenheit to_fahrenheit ; int ; float ; Convert {x} degrees Celsius to Fahrenheit. ;
    x*9/5+32
compound_interest grow ; year small ; float ; Return the value of {x} after {y} years at 5 percent a
    year. ; round(x*1.05**y,2)
transpose flip_matrix ; matrix ; list[list[int]] ; Exchange the rows and columns of {x}. ; [list(r)
    for r in zip(*x)]
row_sums sum_rows ; matrix ; list[int] ; Return the sum of every row of {x}. ; [sum(r) for r in x]
column_maxima max_per_column ; matrix ; list[int] ; Return the largest element of every column of
    {x}. ; [max(c) for c in zip(*x)]
diagonal main_diagonal ; matrix ; list[int] ; Return the elements on the main diagonal of {x}. ;
    [x[i][i] for i in range(min(len(x),len(x[0])))]
flatten join_rows ; matrix ; list[int] ; Return all elements of {x}, row by row, in one list. ; [v
    for r in x for v in r]
rotate_clockwise turn_right ; matrix ; list[list[int]] ; Turn {x} by 90 degrees clockwise. ;
    [list(r) for r in zip(*x[::-1])]
scale_matrix multiply_matrix ; matrix small ; list[list[int]] ; Multiply every element of {x} by
    {y}. ; [[v*y for v in r] for r in x]
invert_mapping swap_keys ; table ; dict[int, str] ; Exchange keys and values; the last of equal
    values wins. ; {v:k for k,v in x.items()}
best_key key_of_largest ; table ; str ; Return the key with the largest value, the first of equal
    ones. ; max(x,key=x.get)
total_value sum_values ; table ; int ; Return the sum of all values of {x}. ; sum(x.values())
sort_by_value rank ; table ; list[str] ; Return the keys of {x} ordered by value, smallest first. ;
    sorted(x,key=x.get)
keys_above filter_keys ; table small ; list[str] ; Return the sorted keys whose value is above {y}.
    ; sorted(k for k in x if x[k]>y)
add_tables merge_counts ; table table ; dict[str, int] ; Add the values of {x} and {y} key by key. ;
    {k:x.get(k,0)+y.get(k,0) for k in sorted({*x,*y})}
raise_prices increase_all ; table small ; dict[str, int] ; Return a copy of {x} with {y} added to
    every value. ; {k:v+y for k,v in x.items()}
group_by_length words_per_length ; words ; dict[int, list[str]] ; Group the words of {x} by their
    length. ; {n:[w for w in x if len(w)==n] for n in sorted({len(w) for w in x})}
group_by_first_letter index_words ; words ; dict[str, list[str]] ; Group the words of {x} by first
    letter. ; {c:[w for w in x if w[0]==c] for c in sorted({w[0] for w in x})}
number_lines enumerate_words ; words ; list[str] ; Put its position, counted from 1, before every
    word. ; [f'{i}. {w}' for i,w in enumerate(x,1)]
comma_list join_with_and ; words ; str ; Join the words with commas, and the last with 'and'. ; ',
    '.join(x[:-1])+' and '+x[-1]
pad_words align_left ; words ; list[str] ; Fill every word with dots up to the longest length. ;
    [w.ljust(max(map(len,x)),'.') for w in x]
count_starting_with starts_with_count ; words letter ; int ; Count the words of {x} that start with
    {y}. ; sum(w.startswith(y) for w in x)
snake_case to_snake_case ; text ; str ; Write {x} in lower case with underscores for spaces. ;
    x.lower().replace(' ','_')
camel_case to_camel_case ; text ; str ; Join the words of {x}, capitalizing all but the first. ;
    x.split()[0]+''.join(w.capitalize() for w in x.split()[1:])
replace_letter substitute ; word letter ; str ; Replace each {y} in {x} by a star. ;
    x.replace(y,'*')
letter_positions find_letter ; word letter ; list[int] ; Return all indices at which {y} occurs in
    {x}. ; [i for i,c in enumerate(x) if c==y]
mask_text hide_all_but ; word small ; str ; Replace all but the last {y} letters of {x} with '#'. ;
    '#'*max(0,len(x)-y)+x[-y:]
"""

# How an argument is named and annotated.
_ARGUMENTS = {
    "ints": ("numbers values nums items data readings", "list[int]"),
    "int": ("n number value limit total", "int"),
    "small": ("k size step times width", "int"),
    "year": ("n year amount quantity", "int"),
    "text": ("text sentence line message phrase", "str"),
    "word": ("s word string key code", "str"),
    "words": ("words names strings tokens entries", "list[str]"),
    "letter": ("letter char c symbol", "str"),
    "matrix": ("matrix grid rows table", "list[list[int]]"),
    "table": ("scores prices stock counts ages", "dict[str, int]"),
}
_WORDS = """apple river stone cloud green paper house train music bread light ocean tiger lemon
    window garden silver winter basket rocket banana kitten summer letter pencil moon sun tree cat
    level noon refer data orange engine umbrella island actor elbow
    code python lamp chair sugar honey""".split()  # noqa: SIM905

# The first is the wrapper that the DFlash and DDTree benchmarks put around a HumanEval prompt.
_WRAPPERS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```",
    "Complete the following Python function.\n\n```python\n{}\n```",
    "Please finish this function:\n\n{}",
    "Implement the function below. Explain your solution briefly.\n\n```python\n{}```",
    "Here is a Python signature with its docstring. Write the whole function.\n\n{}",
    "{}",
    "Can you write the body of this function?\n```\n{}```",
    "Complete the code and add a short test:\n\n```python\n{}```",
)


def stub(rng: random.Random) -> str:
    """A prompt that asks to complete one Python function."""
    name, kinds, result, doc, code = _row(rng) if rng.random() < 0.45 else _pipeline(rng)
    names = _parameter_names(kinds, rng)
    doc = doc.replace("{x}", f"`{names[0]}`" if rng.random() < 0.2 else names[0])
    doc = doc.replace("{y}", names[-1])
    calls = _examples(kinds, code, rng)
    head = _signature(name, names, [_ARGUMENTS[kind][1] for kind in kinds], result, rng)
    text = f"{head}\n{_docstring(name, doc, calls, rng)}"
    wrapper = _WRAPPERS[0] if rng.random() < 0.4 else rng.choice(_WRAPPERS)
    return wrapper.replace("{}", text)


def _row(rng: random.Random) -> tuple[str, list[str], str, str, str]:
    names, kinds, result, doc, code = rng.choice(_TASKS)
    return rng.choice(names.split()), kinds.split(), result, doc, code


def _pipeline(rng: random.Random) -> tuple[str, list[str], str, str, str]:
    kind = rng.choice(sorted(_PIPELINES))
    (which, cond, test), (change, how, expression), (end, what, result, last) = (
        rng.choice(part) for part in _PIPELINES[kind]
    )
    number, element = str(rng.randint(2, 9)), "numbers" if kind == "ints" else "words"
    unchanged = expression == "v"
    doc = rng.choice(_UNCHANGED_DOCS if unchanged else _PIPELINE_DOCS)
    place = {"E": element, "C": _describe(cond, element), "H": how, "W": what}
    doc = re.sub(r"\b[ECHW]\b", lambda m: place[m[0]], doc)
    change = element if unchanged else change
    name = rng.choice((f"{end}_of_{which}_{change}", f"{which}_{change}_{end}"))
    code = f"(lambda r: {last})([{expression} for v in x if {test}])"
    doc, code = (re.sub(r"\bk\b", number, part) for part in (doc, code))
    return name, [kind], result, doc, code


def _describe(condition: str, element: str) -> str:
    """Thus "even" gives "even numbers"; "that start with a vowel" gives "words that ..."."""
    before = condition in ("even", "odd", "negative", "positive")
    return f"{condition} {element}" if before else f"{element} {condition}"


def _parameter_names(kinds: list[str], rng: random.Random) -> list[str]:
    if len(kinds) == 2 and kinds[0] == kinds[1]:
        return rng.choice((["first", "second"], ["a", "b"], ["left", "right"], ["xs", "ys"]))
    return [rng.choice(_ARGUMENTS[kind][0].split()) for kind in kinds]


def _argument(kind: str, rng: random.Random) -> object:
    """A value of one kind for a docstring example."""
    words = rng.sample(_WORDS, rng.randint(3, 5))
    return {
        "ints": lambda: [rng.randint(-9, 30) for _ in range(rng.randint(4, 6))],
        "int": lambda: rng.randint(2, 60),
        "small": lambda: rng.randint(2, 4),
        "year": lambda: rng.randint(100, 2400),
        "text": lambda: " ".join(words) + rng.choice(("", "", f" {rng.randint(1, 99)}")),
        "word": lambda: words[0] if rng.random() < 0.7 else "".join(rng.choices("aabbc", k=6)),
        "words": lambda: words,
        "letter": lambda: rng.choice("aeionrst"),
        "matrix": lambda: [[rng.randint(0, 9) for _ in words[:3]] for _ in words[1:]],
        "table": lambda: {word: rng.randint(1, 20) for word in words},
    }[kind]()


def _examples(kinds: list[str], code: str, rng: random.Random) -> list[tuple[str, str]]:
    """Up to three calls, as the text of their arguments, with the text of their results."""
    scope = {"groupby": groupby, "combinations": combinations, "commonprefix": commonprefix}
    examples = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        arguments = [_argument(kind, rng) for kind in kinds]
        names = dict(zip("xy", arguments, strict=False))
        try:
            value = eval(code, {**scope, **names})  # our own table
        except (IndexError, ValueError):  # too few elements for this task: do without
            continue
        examples.append((", ".join(map(repr, arguments)), _literal(value)))
    return examples


def _literal(value: object) -> str:
    """`repr`, but with the elements of a set in one order on every run."""
    if isinstance(value, set) and value:
        return "{" + ", ".join(map(repr, sorted(value))) + "}"
    return repr(value)


def _signature(
    name: str, names: list[str], types: list[str], result: str, rng: random.Random
) -> str:
    """The lines before the docstring: with types, types as older code writes them, or none."""
    style = rng.random()
    if style > 0.85:
        return f"def {name}({', '.join(names)}):"
    typed = ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True))
    text = f"def {name}({typed}) -> {result}:"
    if style > 0.35:
        return text
    text = re.sub(r"\b(list|dict|tuple|set)\[", _capital, text)
    used = sorted(set(re.findall(r"List|Dict|Tuple|Set", text)))
    return f"from typing import {', '.join(used)}\n\n\n{text}" if used else text


def _capital(match: re.Match[str]) -> str:
    return match[0].capitalize()


def _docstring(name: str, doc: str, calls: list[tuple[str, str]], rng: random.Random) -> str:
    form = rng.randrange(5)
    if form == 0:
        lines = [doc] + [f"{name}({given}) -> {value}" for given, value in calls]
    elif form == 1:
        lines = [doc, "", "Examples:"] + [f"{name}({given}) == {value}" for given, value in calls]
    elif form == 2:
        lines = [doc] + [f"For example, {name}({g}) should return {v}." for g, v in calls[:1]]
    else:
        lines = [doc] + [part for g, v in calls for part in (f">>> {name}({g})", v)]
    if len(doc) > 76:
        lines[:1] = textwrap.wrap(doc, 76)
    quotes = "'''" if rng.random() < 0.1 else '"""'
    return "\n".join([f"    {quotes} {lines[0]}", *(f"    {line}".rstrip() for line in lines[1:]),
                      f"    {quotes}\n"])  # fmt: skip


def _parts(text: str) -> list[list[str]]:
    """Items like "even: even ; v%2==0", between bars, as lists: the name, then its parts."""
    items = [item for line in text.splitlines() for item in line.split(" | ")]
    return [[part.strip() for part in item.replace(":", " ;", 1).split(" ; ")] for item in items]


_TASKS = [" ".join(row.split()).split(" ; ") for row in re.split(r"\n(?=\S)", _ROWS.strip())]
_PIPELINE_DOCS = (  # C: which elements, H: how each changes, W: what comes out, E: numbers or words
    "Take the C, replace each by its H, and return W.",
    "Keep only the C in the input. Compute the H of each and return W.",
    "Select the C, work out the H of each one, then return W.",
    "From the given E, select the C. For each of them use its H; the result is W.",
    "Consider only C. After replacing each one by its H, return W.",
)
_UNCHANGED_DOCS = (
    "Take the C and return W.",
    "Ignore everything but the C in the input, and return W.",
    "From the given E, select the C; the result is W.",
)
# Which elements ; how each changes ; what comes out. `k` stands for a small number.
_PIPELINE_ROWS = {
    "ints": (
        """even: even ; v%2==0 | odd: odd ; v%2 | negative: negative ; v<0
        positive: positive ; v>0
        multiples: divisible by k ; v%k==0 | large: greater than k ; v>k | small: at most k ; v<=k
        two_digit: that have two digits ; 10<=abs(v)<=99 | not_multiples: not divisible by k ; v%k
        other: different from k ; v!=k""",
        """squares: square ; v*v | doubles: double ; 2*v | cubes: cube ; v**3 | values: value ; v
        last_digits: last digit ; abs(v)%10 | digit_sums: sum of digits ; sum(map(int,str(abs(v))))
        halves: rounded-down half ; v//2 | opposites: opposite ; -v | shifted: sum with k ; v+k
        remainders: remainder modulo k ; v%k | sizes: absolute value ; abs(v)""",
        """sum: the sum ; int ; sum(r)
        largest: the largest, or 0 if there is none ; int ; max(r,default=0)
        smallest: the smallest, or 0 if there is none ; int ; min(r,default=0)
        list: a list ; list[int] ; r | sorted: a sorted list ; list[int] ; sorted(r)
        count: the number of different values ; int ; len(set(r))
        last: a list of the last k ; list[int] ; r[-k:]
        reversed: a list in reverse order ; list[int] ; r[::-1]
        average: the mean, or 0.0 if there is none ; float ; round(sum(r)/max(len(r),1),2)""",
    ),
    "words": (
        """long: longer than k letters ; len(v)>k | short: of at most k letters ; len(v)<=k
        e: that contain an 'e' ; 'e' in v | vowel: that start with a vowel ; v[0] in 'aeiou'
        even: of even length ; len(v)%2==0 | s: that do not contain an 's' ; 's' not in v
        repeated: in which a letter occurs twice ; len(set(v))<len(v)
        n_or_r: that end in 'n' or 'r' ; v[-1] in 'nr'""",
        """upper: upper-case form ; v.upper() | reversed: reversed form ; v[::-1]
        starts: first letter ; v[0]
        capitalized: capitalized form ; v.capitalize() | ends: last two letters ; v[-2:]
        doubled: text written twice ; v+v | sorted_letters: letters in order ; ''.join(sorted(v))
        texts: text ; v""",
        """join: a text with spaces between them ; str ; ' '.join(r)
        dashes: a text with dashes between them ; str ; '-'.join(r)
        list: a list ; list[str] ; r | sorted: a sorted list ; list[str] ; sorted(r)
        length: their total length ; int ; sum(map(len,r))
        unique: the set of them ; set[str] ; set(r)
        lengths: a dictionary from each to its length ; dict[str, int] ; {v: len(v) for v in r}""",
    ),
}
_PIPELINES = {kind: [_parts(text) for text in parts] for kind, parts in _PIPELINE_ROWS.items()}
