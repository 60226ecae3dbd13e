"""scripts/decode.py: its errors, its JSON, its comparison, prompts of text, streamed text."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ORACLE, golden

from ddtree_jax import Engine, text
from ddtree_jax.commands import decode, shell
from ddtree_jax.commands.prompts import from_file

NAME = "qwen3_gqa"
TARGET, DRAFT = str(ORACLE / NAME / "target"), str(ORACLE / NAME / "draft")
PAIR = ["--target", TARGET, "--draft", DRAFT]
# One set of shapes for all tests, so that they share compiled programs.
SMALL = ["--dtype", "float32", "--max-new-tokens", "24", "--tree-budget", "7", "--ignore-eos"]
PROMPT = golden(NAME)["prompts"][0]
WANTED = golden(NAME)["ar"][0][:24]


@pytest.fixture
def ids(tmp_path):
    """ids(value): a --prompt-ids file."""

    def write(value=PROMPT, name="ids.json"):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


def run(capsys, *argv):
    code = decode.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, argv, *words):
    """Exit 2 and one clear sentence, without a traceback."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for word in words:
        assert word in err


# Errors.


def test_kernels_that_cannot_run_are_refused(capsys, ids):
    argv = [*PAIR, "--prompt-ids", ids(), "--attention", "mosaic"]
    refused(capsys, argv, "attention mosaic cannot be used", "the device is a cpu")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--trace", "trace.html"),
        ("--chat", None),
        ("--tree-budget", "auto"),
    ],
)
def test_flags_of_later_are_refused_by_name(capsys, ids, flag, value):
    argv = [flag] if value is None else [flag, value]
    refused(capsys, [*PAIR, "--prompt-ids", ids(), *argv], flag, "not supported yet")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--mode", "tree"], ["--mode", "tree"]),
        (["--dtype", "int8"], ["--dtype"]),
        (["--tree-budget", "0"], ["budget is 0"]),
        (["--tree-budget", "-3"], ["budget is -3"]),
        (["--tree-budget", "many"], ["--tree-budget", "many"]),
        (["--max-new-tokens", "0"], ["max_new_tokens is 0"]),
        (["--max-new-tokens", "x"], ["--max-new-tokens"]),
        (["--temperature", "-1"], ["temperature is -1"]),
        (["--temperature", "1e-40"], ["temperature is 1e-40", "1e-20"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--seed", "4294967296"], ["seed is 4294967296", "2^32"]),
        (["--batch-size", "0"], ["batch size is 0"]),
        (["--max-length", "0"], ["maximum length is 0"]),
        (["--max-length", "513"], ["maximum length is 513", "512"]),
        (["--prefill-chunk", "0"], ["prefill chunk is 0"]),
        (["--top-k", "-1"], ["top_k is -1"]),
        (["--top-p", "0"], ["top_p is 0"]),
        (["--top-p", "1.1"], ["top_p is 1.1"]),
        (["--min-p", "-0.1"], ["min_p is -0.1"]),
        (["--repetition-penalty", "0"], ["repetition_penalty is 0"]),
        (["--presence-penalty", "inf"], ["presence_penalty is inf"]),
        (["--frequency-penalty", "nan"], ["frequency_penalty is nan"]),
        (["--min-new-tokens", "-1"], ["min_new_tokens is -1"]),
        (["--min-new-tokens", "9", "--max-new-tokens", "8"], ["min_new_tokens is 9", "8"]),
        (["--logit-bias", "3"], ["--logit-bias is '3'", "ID=V"]),
        (["--logit-bias", "3=x"], ["--logit-bias is '3=x'"]),
        (["--logit-bias", "3=inf"], ["token 3 is inf"]),
        (["--logit-bias", "3=1e39"], ["token 3 is 1e+39", "1e+09"]),
        (["--logit-bias", "128=1"], ["token 128", "127"]),
        (["--logit-bias", "3=1", "--logit-bias", "3=2"], ["token 3 twice"]),
        (["--stop", "END"], ["--stop", "--prompt-ids"]),
        (["--logprobs"], ["--logprobs", "--json"]),
        (["--n", "0"], ["n is 0"]),
        (["--n", "3", "--batch-size", "2"], ["--n is 3", "--batch-size, 2"]),
        (["--draft-noise", "maybe"], ["--draft-noise"]),
        (["--tp", "64"], ["--tp 64", "64 devices", "the 1 (cpu)"]),
        (["--data", "64", "--tp", "2"], ["--data 64", "128 devices"]),
        (["--tp", "0"], ["--tp is 0"]),
        (["--data", "-1"], ["--data is -1"]),
        (["--raw"], ["--prompt-ids", "--raw"]),
        (["--system", "Be brief."], ["--prompt-ids", "--system"]),
        (["a prompt"], ["PROMPT", "--prompt-ids"]),
    ],
)
def test_bad_usage(capsys, ids, argv, words):
    refused(capsys, [*PAIR, "--prompt-ids", ids(), *argv], *words)


def test_two_prompt_files(capsys, ids, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Hello.\n")
    both = ["--prompt-file", str(path), "--prompt-ids", ids()]
    refused(capsys, [*PAIR, *both], "--prompt-file", "--prompt-ids", "only one")


def test_one_model_without_the_other(capsys, ids):
    prompt = ["--prompt-ids", ids()]
    for extra in (["--mode", "ddtree"], ["--mode", "dflash"], ["--mode", "ar", "--compare"], []):
        refused(capsys, ["--target", TARGET, *prompt, *extra], "--target alone", "--draft")
    refused(capsys, ["--draft", DRAFT, *prompt], "--draft needs --target")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], ["non-empty"]),
        ([[1, 2], []], ["non-empty"]),
        ("", ["not valid JSON"]),
        ("{", ["not valid JSON"]),
        ({"a": 1}, ["list of token ids"]),
        ([1, "2"], ["list of token ids"]),
        ([1, True], ["list of token ids"]),
        ([1.5], ["list of token ids"]),
        ([1, 128], ["prompt 0", "0..127"]),
        ([[1], [1, -1]], ["prompt 1", "0..127"]),
        ([1] * 512, ["512 tokens"]),
    ],
)
def test_bad_token_ids(capsys, ids, value, words):
    refused(capsys, [*PAIR, *SMALL, "--prompt-ids", ids(value)], *words)


def test_prompt_as_long_as_the_maximum_length(capsys, ids):
    argv = [*PAIR, *SMALL, "--max-length", "20", "--prompt-ids", ids([1] * 20)]
    refused(capsys, argv, "20 tokens", "maximum length")


def test_files_that_do_not_exist(capsys, ids, tmp_path):
    missing = str(tmp_path / "missing")
    refused(capsys, [*PAIR, "--prompt-ids", missing], missing, "no such file")
    refused(capsys, [*PAIR, "--prompt-file", missing], missing, "no such file")
    prompt = ["--prompt-ids", ids()]
    refused(capsys, ["--target", missing, "--draft", DRAFT, *prompt], missing)
    refused(capsys, ["--target", TARGET, "--draft", missing, *prompt], missing)


def test_json_paths_that_cannot_be_written(capsys, ids, tmp_path):
    (tmp_path / "file").write_text("kept")
    argv = [*PAIR, "--prompt-ids", ids(), "--json"]
    refused(capsys, [*argv, str(tmp_path)], str(tmp_path), "folder")
    refused(capsys, [*argv, str(tmp_path / "file" / "out.json")], "out.json", "cannot be written")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_that_refuses_files(capsys, ids, tmp_path, monkeypatch):
    """As /proc does, to whoever has every permission."""

    def refuse(dir):
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(shell.tempfile, "TemporaryFile", refuse)
    argv = [*PAIR, "--prompt-ids", ids(), "--json", str(tmp_path / "out.json")]
    refused(capsys, argv, "out.json: cannot be written (No such file", str(tmp_path))


def test_a_folder_without_permission(capsys, ids, tmp_path, monkeypatch):
    """The tests may run as root, whom nothing is forbidden: the system's answer is changed."""
    asked = []
    monkeypatch.setattr(shell.os, "access", lambda *question: asked.append(question))
    argv = [*PAIR, "--prompt-ids", ids(), "--json", str(tmp_path / "out.json")]
    refused(capsys, argv, "out.json", f"no permission for {tmp_path.resolve()}")
    assert asked == [(tmp_path.resolve(), shell.os.W_OK)]


@pytest.fixture
def edited(tmp_path):
    """edited(role, **changes): a copy of a model with other values in its config.json."""

    def copy(role, **changes):
        folder = tmp_path / role
        shutil.copytree(ORACLE / NAME / role, folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            owner = config["dflash_config"] if key in config.get("dflash_config", {}) else config
            owner[key] = value
            if value is None:
                del owner[key]
        path.write_text(json.dumps(config))
        return str(folder)

    return copy


@pytest.mark.parametrize(
    ("role", "changes", "words"),
    [
        ("target", {"architectures": ["MambaForCausalLM"]}, ["architectures", "Mamba"]),
        ("target", {"hidden_size": None}, ["hidden_size", "missing"]),
        ("draft", {"mask_token_id": None}, ["mask_token_id"]),
        ("draft", {"target_layer_ids": None}, ["target_layer_ids"]),
        ("draft", {"block_size": None}, ["block_size"]),
        ("draft", {"hidden_size": 48}, ["hidden_size", "48", "40"]),
        ("draft", {"num_target_layers": 6}, ["num_target_layers", "6", "5"]),
        ("draft", {"vocab_size": 96}, ["vocab_size", "96", "128"]),
        ("draft", {"mask_token_id": 128}, ["mask_token_id", "128"]),
        ("draft", {"target_layer_ids": [1, 2, 5]}, ["target_layer_ids", "5"]),
    ],
)
def test_models_that_are_refused(capsys, ids, edited, role, changes, words):
    folder = edited(role, **changes)
    models = {"target": TARGET, "draft": DRAFT} | {role: folder}
    argv = ["--target", models["target"], "--draft", models["draft"], "--prompt-ids", ids()]
    refused(capsys, argv, folder, *words)


def test_folders_that_are_no_model(capsys, ids, tmp_path):
    (tmp_path / "empty").mkdir()
    empty, prompt = str(tmp_path / "empty"), ["--prompt-ids", ids()]
    refused(capsys, ["--target", empty, "--draft", DRAFT, *prompt], empty)
    refused(capsys, ["--target", TARGET, "--draft", empty, *prompt], empty)
    refused(capsys, ["--target", DRAFT, "--draft", DRAFT, *prompt], "drafter")
    refused(capsys, ["--target", TARGET, "--draft", TARGET, *prompt], "drafter")


def test_debug_shows_the_traceback(capsys, tmp_path):
    argv = [*PAIR, "--prompt-ids", str(tmp_path / "missing"), "--debug"]
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_text_needs_a_tokenizer(capsys):
    refused(capsys, [*PAIR, *SMALL, "Hello."], TARGET, "tokenizer.json", "--prompt-ids")


# Results.

KEYS = {
    "prompt_index": int,
    "sample_index": int,
    "mode": str,
    "tree_budget": int | None,
    "prompt_tokens": int,
    "output_ids": list,
    "text": str | None,
    "finish_reason": str,
    "rounds": int,
    "accept_lengths": list,
    "tau": float | None,
    "time_to_first_token_s": float,
    "decode_s": float,
    "tokens_per_s": float | None,
    "attention": str,
    "device": str,
}


def check_run(entry):
    for key, kind in KEYS.items():
        assert isinstance(entry[key], kind), key
    assert len(entry["output_ids"]) == 1 + sum(entry["accept_lengths"])
    assert entry["rounds"] == len(entry["accept_lengths"])
    assert entry["finish_reason"] in ("stop", "length")
    assert entry["sample_index"] == 0
    if entry["rounds"]:
        assert entry["tau"] == pytest.approx(sum(entry["accept_lengths"]) / entry["rounds"])
    else:
        assert entry["tau"] is entry["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("mode", "budget"), [("ar", None), ("dflash", None), ("ddtree", 7)], ids=str
)
def test_json_on_stdout_and_nothing_else(capsys, ids, mode, budget):
    argv = [*PAIR, *SMALL, "--mode", mode, "--prompt-ids", ids(), "--json", "-"]
    code, out, _ = run(capsys, *argv)
    result = json.loads(out)
    assert code == 0
    assert result["schema"] == 1
    (entry,) = result["runs"]
    check_run(entry)
    assert (entry["mode"], entry["tree_budget"]) == (mode, budget)
    assert entry["output_ids"] == WANTED
    assert entry["prompt_tokens"] == len(PROMPT)
    assert entry["text"] is None
    assert "compare" not in result


def test_json_in_a_file_beside_the_ids_on_stdout(capsys, ids, tmp_path):
    path = tmp_path / "new" / "out.json"
    argv = [*PAIR, *SMALL, "--prompt-ids", ids(), "--json", str(path), "--quiet"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert [int(word) for word in out.split()] == WANTED
    (entry,) = json.loads(path.read_text())["runs"]
    check_run(entry)
    assert entry["output_ids"] == WANTED
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]  # no temporary file left


def test_samples_and_log_probabilities(capsys, ids):
    argv = [*PAIR, *SMALL, "--prompt-ids", ids(), "--n", "2", "--temperature", "1", "--logprobs"]
    argv += ["--top-p", "0.95", "--repetition-penalty", "1.1", "--logit-bias", f"{WANTED[1]}=-90"]
    code, out, _ = run(capsys, *argv, "--json", "-")
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [(entry["prompt_index"], entry["sample_index"]) for entry in runs] == [(0, 0), (0, 1)]
    assert runs[0]["output_ids"] != runs[1]["output_ids"]
    for entry in runs:
        assert len(entry["logprobs"]) == len(entry["output_ids"])
        assert max(entry["logprobs"]) <= 0
        assert entry["output_ids"][1] != WANTED[1]


def test_one_token_has_no_round(capsys, ids):
    argv = [*PAIR, *SMALL, "--max-new-tokens", "1", "--prompt-ids", ids(), "--json", "-"]
    code, out, _ = run(capsys, *argv)
    (entry,) = json.loads(out)["runs"]
    check_run(entry)
    assert (code, entry["output_ids"], entry["rounds"]) == (0, WANTED[:1], 0)


def test_compare(capsys, ids):
    prompts = golden(NAME)["prompts"][:2]
    argv = [*PAIR, *SMALL, "--prompt-ids", ids(prompts), "--compare", "--json", "-"]
    code, out, err = run(capsys, *argv)
    result = json.loads(out)
    assert code == 0
    assert "All texts agree." in err
    compare = result["compare"]
    assert compare["texts_agree"] is True
    assert compare["differences"] == []
    assert [row["mode"] for row in compare["rows"]] == ["ar", "dflash", "ddtree"]
    assert all({"tau", "tokens_per_s", "speed_up"} <= set(row) for row in compare["rows"])
    assert len(result["runs"]) == 6
    for entry in result["runs"]:
        check_run(entry)
        assert entry["output_ids"] == golden(NAME)["ar"][entry["prompt_index"]][:24]


def test_compare_fails_where_float32_texts_differ(capsys, ids, monkeypatch):
    """A wrong mode must not pass: here the tree's texts end one token early."""
    original = decode._Session.decode

    def wrong(self, options, *, show):
        original(self, options, show=show)
        if options.mode == "ddtree":
            self.runs[-1].generation.output_ids[3] ^= 1

    monkeypatch.setattr(decode._Session, "decode", wrong)
    code, out, err = run(capsys, *PAIR, *SMALL, "--prompt-ids", ids(), "--compare", "--json", "-")
    compare = json.loads(out)["compare"]
    assert code == 1
    assert "All texts agree." not in err
    assert compare["texts_agree"] is False
    (difference,) = compare["differences"]
    assert (difference["mode"], difference["position"]) == ("ddtree", 3)
    assert (difference["prompt_index"], difference["sample_index"]) == (0, 0)
    assert difference["top2_gap"] > 0
    said = f"output token 3, where the target's best two differ by {difference['top2_gap']:.4f}"
    assert said in err

    # Penalties change every logit, and a filter may leave one token: no choice was close.
    for asked in (["--presence-penalty", "0.5"], ["--temperature", "1", "--top-k", "1"]):
        argv = [*PAIR, *SMALL, "--prompt-ids", ids(), "--compare", *asked, "--json", "-"]
        _, out, err = run(capsys, *argv)
        (difference,) = json.loads(out)["compare"]["differences"]
        assert difference["top2_gap"] is None
        assert "prompt 0, turn 0, sample 0: ddtree parts from ar at output token 3\n" in err

    # Of several samples, which one.
    argv = [*PAIR, *SMALL, "--prompt-ids", ids(), "--n", "2", "--temperature", "1", "--compare"]
    _, out, err = run(capsys, *argv, "--json", "-")
    (difference,) = json.loads(out)["compare"]["differences"]
    assert difference["sample_index"] == 1
    assert "prompt 0, turn 0, sample 1: ddtree parts" in err


def test_samples_are_shown_in_order(capsys, ids, monkeypatch):
    """Whichever ends first: that depends on mode and tree."""
    original = Engine.run

    def other_way_round(self, *given, **named):
        events = list(original(self, *given, **named))
        yield from sorted(events, key=lambda each: (each[0].done, -each[0].index, -each[0].sample))

    monkeypatch.setattr(Engine, "run", other_way_round)
    prompts = golden(NAME)["prompts"][:2]
    argv = [*PAIR, *SMALL, "--prompt-ids", ids(prompts), "--n", "2", "--temperature", "1"]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    headers = [line for line in out.splitlines() if line.startswith("---")]
    assert headers == [f"--- prompt {p}, sample {s}" for p in range(2) for s in range(2)]

    def interrupted(*given, **named):
        for event, result in other_way_round(*given, **named):
            if (event.index, event.sample, event.done) == (0, 1, True):
                raise KeyboardInterrupt
            yield event, result

    monkeypatch.setattr(Engine, "run", interrupted)
    code, out, _ = run(capsys, *argv)
    assert code == 130
    headers = [line for line in out.splitlines() if line.startswith("---")]
    assert headers == [f"--- prompt 1, sample {s}" for s in range(2)]


# Text.

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}"
    "{{ '?' if enable_thinking else '!' }}{% endif %}{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def write_tokenizer(folder, byte_tokens):
    """Characters and bytes as tokens: 128 in all when `byte_tokens` are few."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in byte_tokens)]
    names += [chr(code) for code in range(32, 127)]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """The target with a tokenizer whose 128 tokens hold some bytes of longer characters."""
    folder = tmp_path_factory.mktemp("spoken") / "target"
    shutil.copytree(TARGET, folder)
    bytes_of = sorted({*"é€🙂".encode(), *range(0x80, 0x96)})[:29]
    assert len(write_tokenizer(folder, bytes_of)) == 128
    return folder, text.load_tokenizer(folder)


def spoken_runs(capsys, spoken, *argv):
    folder, _ = spoken
    code, out, err = run(
        capsys, "--target", str(folder), "--draft", DRAFT, *SMALL, "--json", "-", *argv
    )
    assert code == 0, err
    return json.loads(out)["runs"]


def test_streamed_text_is_the_text(capsys, spoken, tmp_path):
    folder, tokenizer = spoken
    path = tmp_path / "out.json"
    argv = ["--target", str(folder), "--draft", DRAFT, *SMALL, "--json", str(path), "Hello."]
    outputs = []
    for extra in ([], ["--no-stream"]):
        code, out, _ = run(capsys, *argv, *extra)
        assert code == 0
        (entry,) = json.loads(path.read_text())["runs"]
        assert entry["text"] == tokenizer.decode(entry["output_ids"], skip_special_tokens=True)
        outputs.append(out)
        assert out == entry["text"] + "\n"
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_shown_text_ends_before_a_stop(capsys, spoken, tmp_path, streamed):
    folder, _ = spoken
    path = tmp_path / "out.json"
    argv = ["--target", str(folder), "--draft", DRAFT, *SMALL, "--json", str(path), "Hello."]
    argv += [] if streamed else ["--no-stream"]
    assert run(capsys, *argv)[0] == 0
    (whole,) = json.loads(path.read_text())["runs"]
    stop = whole["text"][8:10]
    code, out, _ = run(capsys, *argv, "--stop", stop, "--stop", "nowhere")
    (entry,) = json.loads(path.read_text())["runs"]
    assert code == 0
    assert out == entry["text"] + "\n"
    assert entry["text"] == whole["text"][: whole["text"].find(stop)]
    assert entry["finish_reason"] == "stop"
    assert entry["output_ids"] == whole["output_ids"][: len(entry["output_ids"])]
    assert len(entry["output_ids"]) < len(whole["output_ids"])
    check_run(entry)


def test_samples_of_conversations_are_refused(capsys, tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["Hi", "And?"]}))
    refused(capsys, [*PAIR, "--prompt-file", str(path), "--n", "2"], "--n is 2", "several turns")


def test_prompt_text_goes_through_the_template(capsys, spoken):
    def tokens(*argv):
        return [entry["prompt_tokens"] for entry in spoken_runs(capsys, spoken, *argv)]

    # <|user|> Hello. <|end|> <|assistant|>
    assert tokens("Hello.") == [9]
    assert tokens("--raw", "Hello.") == [6]
    assert tokens("--thinking", "Hello.") == tokens("--no-thinking", "Hello.") == [10]
    assert tokens("--system", "Hi", "Hello.") == [13]
    assert tokens("Hello.", "Hi") == [9, 5]


def test_a_conversation_holds_its_answers(capsys, spoken, tmp_path):
    path = tmp_path / "turns.jsonl"
    lines = [{"turns": ["Hi", "And?"]}, {"prompt": "Yes"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    runs = spoken_runs(capsys, spoken, "--prompt-file", str(path))
    assert [(entry["prompt_index"], entry["turn"]) for entry in runs] == [(0, 0), (1, 0), (0, 1)]
    _, tokenizer = spoken
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": runs[0]["text"]},
        {"role": "user", "content": "And?"},
    ]
    assert runs[2]["prompt_tokens"] == len(text.encode_chat(tokenizer, messages))


def test_no_template_needs_raw(capsys, spoken, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(spoken[0], folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    argv = ["--target", str(folder), "--draft", DRAFT, *SMALL, "Hello."]
    refused(capsys, argv, "chat template", "--raw")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ("\n  \n", ["empty"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["line 2", "not valid JSON"]),
        ('{"prompt": "a"}\n{"text": "b"}\n', ["line 2", "'prompt' or 'turns'"]),
        ('{"prompt": ""}\n', ["line 1", "'prompt'"]),
        ('{"prompt": 3}\n', ["line 1", "'prompt' is 3"]),
        ('{"turns": []}\n', ["line 1", "'turns'"]),
        ('{"turns": ["a", " "]}\n', ["line 1", "'turns'"]),
    ],
)
def test_bad_prompt_files(capsys, tmp_path, content, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    refused(capsys, [*PAIR, "--prompt-file", str(path)], str(path), *words)


def test_empty_prompts(capsys):
    refused(capsys, [*PAIR, "Hello.", " "], "prompt 1 is empty")


def test_plain_prompt_files(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("One line.\n\nAnother: é.\n", encoding="utf-8")
    assert [each.turns for each in from_file(str(path))] == [("One line.",), ("Another: é.",)]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, range(256))
    return text.load_tokenizer(folder)


LOADS = """
import concurrent.futures, sys
from pathlib import Path
from ddtree_jax import text
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(*{type(each).__name__ for each in pool.map(text.load_tokenizer, [Path(sys.argv[1])] * 8)})
"""


def test_threads_load_their_tokenizers_at_once(tmp_path):
    """In a fresh process, which has not imported transformers: as two engines of a program do."""
    write_tokenizer(tmp_path, range(256))
    command = [sys.executable, "-c", LOADS, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() in ("TokenizersBackend", "PreTrainedTokenizerFast")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    content=st.text(st.sampled_from("ab é€🙂漢\u0301\u200d"), max_size=20),
    sizes=st.lists(st.integers(1, 6), min_size=1),
)
def test_stream_never_shows_half_a_character(byte_tokenizer, content, sizes):
    ids = byte_tokenizer.encode(content)
    decoder, pieces, start = text.StreamDecoder(byte_tokenizer), [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        start += size
        pieces.append(decoder.push(ids[start - size : start], final=start >= len(ids)))
        # What is shown is a beginning of the text.
        assert content.startswith("".join(pieces))
    assert "".join(pieces) == content


def test_stream_releases_half_a_character_at_the_end(byte_tokenizer):
    ids = byte_tokenizer.encode("a€")
    decoder = text.StreamDecoder(byte_tokenizer)
    assert decoder.push(ids[:2]) in ("", "a")
    whole = byte_tokenizer.decode(ids[:3])
    decoder = text.StreamDecoder(byte_tokenizer)
    assert decoder.push(ids[:1]) + decoder.push(ids[1:3], final=True) == whole


SENTENCEPIECE = ["▁one", "▁two", "s", "▁", ".", "▁.", "é", "<s>", "</s>"]


@pytest.fixture(scope="module", params=["Metaspace", "Strip"])
def sentencepiece(request):
    """A token's space is shown only where text stands before it; spaces may be tidied up."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(SENTENCEPIECE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "."))
    strip = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = (
        decoders.Metaspace() if request.param == "Metaspace" else decoders.Sequence(strip)
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SENTENCEPIECE[-2:]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, len(SENTENCEPIECE) - 1), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 3), min_size=1),
)
def test_stream_is_the_text_of_the_tokens(sentencepiece, ids, sizes):
    """Whatever the tokenizer does with spaces, also behind special tokens (--ignore-eos)."""
    decoder, pieces, start = text.StreamDecoder(sentencepiece), [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        start += size
        pieces.append(decoder.push(ids[start - size : start], final=start >= len(ids)))
    assert "".join(pieces) == text.decode(sentencepiece, ids)


def test_spaces_of_a_tokenizer_that_drops_the_first(sentencepiece):
    ids = [0, 1, 2, 0, 4, 1, 3, 0, 2, 1, 7, 0, 5]
    assert text.decode(sentencepiece, ids) == "one twos one. two  ones two one ."


# What is finished is reported, whatever comes after it.


def test_an_interrupted_comparison_keeps_its_modes_apart(capsys, ids, tmp_path, monkeypatch):
    decoded = decode._Session.decode

    def interrupt(self, options, *, show):
        decoded(self, options, show=show)
        if options.mode == "dflash":
            raise KeyboardInterrupt

    monkeypatch.setattr(decode._Session, "decode", interrupt)
    out = tmp_path / "out.json"
    code, _, err = run(
        capsys, *PAIR, *SMALL, "--prompt-ids", ids(), "--compare", "--json", str(out)
    )
    assert code == 130
    assert err.rstrip().endswith("error: interrupted")
    modes = [entry["mode"] for entry in json.loads(out.read_text())["runs"]]
    assert modes == ["ar", "dflash"]
    assert "ar (float32)" in err
    assert "dflash (float32)" in err


def test_a_turn_that_outgrows_the_length_keeps_the_turns_before(capsys, spoken, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    lines = [{"prompt": "a"}, {"turns": ["Hi", "Tell me more of this"]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--target", str(spoken[0]), "--draft", DRAFT, *SMALL, "--max-length", "40"]
    code, _, err = run(capsys, *argv, "--prompt-file", str(prompts), "--json", str(out))
    assert code == 2
    assert "error: prompt 1, turn 1, has" in err
    assert len(json.loads(out.read_text())["runs"]) == 2


def test_json_follows_links_and_spares_special_files(capsys, ids, tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    argv = [*PAIR, *SMALL, "--mode", "ar", "--quiet", "--prompt-ids", ids()]
    assert run(capsys, *argv, "--json", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["schema"] == 1
    assert run(capsys, *argv, "--json", "/dev/null")[0] == 0
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--raw", "--system", "x", "hi"], "--raw"),
        (["--json", "", "hi"], "--json is empty"),
        (["bad \udcff byte"], "UTF-8"),
    ],
)
def test_flags_that_would_do_nothing(capsys, argv, word):
    refused(capsys, [*PAIR, *argv], word)


def test_deep_json_is_no_crash(capsys, ids):
    refused(capsys, [*PAIR, "--prompt-ids", ids("[" * 100_000)], "not valid JSON")


def test_the_library_says_what_is_missing():
    import ddtree_jax

    engine = ddtree_jax.load(TARGET, DRAFT, dtype="float32", tokenizer=False)
    with pytest.raises(ddtree_jax.InputError, match="no tokenizer"):
        ddtree_jax.generate(engine, "hi")
    with pytest.raises(ddtree_jax.InputError, match="no tokenizer"):
        next(ddtree_jax.stream(engine, [1, 2]))
    with pytest.raises(ddtree_jax.InputError, match="tree budget"):
        ddtree_jax.Options(tree_budget=1.5)
