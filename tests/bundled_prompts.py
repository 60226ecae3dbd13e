"""What the tests of the bundled pair ask, on any machine."""

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker has 24 rolls and sells 9 of them. How many are left? Reason step by step.",
    "List five animals that live in the sea.",
    "Explain photosynthesis to a child.",
    "Write a short poem about autumn.",
    "What are the benefits of regular exercise?",
    "Translate 'good morning' into Spanish.",
    "Write an email to a colleague about moving a meeting to Friday.",
    "How does a bicycle stay upright?",
    "Give me a recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the story of Romeo and Juliet in two sentences.",
    "Name three renewable sources of energy and one advantage of each.",
    "Write a function is_even(n) in JavaScript.",
    "If a train travels 60 miles in 1.5 hours, what is its speed?",
    "Why do leaves change their colour?",
    "Tell me a fun fact about space.",
    "What should I pack for a weekend in the mountains?",
    "Write a dialogue between a cat and a dog.",
]
