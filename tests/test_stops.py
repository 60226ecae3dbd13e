"""Stop strings: text, ids, counts and what is streamed end at one place, in every mode."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ORACLE, golden, rarely
from test_decode_command import write_tokenizer

import ddtree_jax
from ddtree_jax import Engine, Options, text
from ddtree_jax import engine as engines

NAME = "qwen3_gqa"
PROMPT = golden(NAME)["prompts"][0]
BEST = golden(NAME)["ar"][0][:40]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, range(256))
    return text.load_tokenizer(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two rows; tokens are characters, and some bytes of longer ones."""
    folder = tmp_path_factory.mktemp("spoken") / "target"
    shutil.copytree(ORACLE / NAME / "target", folder)
    write_tokenizer(folder, range(0x80, 0x80 + 29))
    return ddtree_jax.load(
        folder, ORACLE / NAME / "draft", dtype="float32", prefill_chunk=24, batch_size=2
    )


def expected(tokenizer, ids, stops, unstopped=0):
    """(tokens, text) by the definition: the fewest tokens whose whole text holds a stop string.

    One that ends in the text of the first `unstopped` tokens is none.
    """
    first = tokenizer.decode(ids[:unstopped], skip_special_tokens=True).rstrip(text.REPLACEMENT)
    for count in range(unstopped + 1, len(ids) + 1):
        whole = tokenizer.decode(ids[:count], skip_special_tokens=True)
        begins = ((stop, max(0, len(first) - len(stop) + 1)) for stop in stops)
        places = [place for stop, begin in begins if (place := whole.find(stop, begin)) >= 0]
        if places:
            return count, whole[: min(places)]
    return None, tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def merged_tokenizer(tmp_path_factory):
    """Byte-level BPE: its tokens may be text together with half a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("merged")
    names = pre_tokenizers.ByteLevel.alphabet()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def shown(some):
        return "".join(name for name, _ in level.pre_tokenize_str(some))

    # The letters of a word's bytes, as the vocabulary writes them.
    words = [shown(word) for word in ("a🙂", " é", "€b", "ab", "b🙂a")]
    pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, i + 5)}
    vocabulary = {name: index for index, name in enumerate([*sorted(names), *sorted(pieces)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (folder / "tokenizer_config.json").write_text(settings)
    loaded = text.load_tokenizer(folder)
    ids = [vocabulary[piece] for piece in sorted(pieces)]
    mixed = [i for i in ids if text.decode(loaded, [i]).strip(text.REPLACEMENT)]
    assert any(text.REPLACEMENT in text.decode(loaded, [i]) for i in mixed)
    return loaded, ids


STOPS = st.lists(st.text(st.sampled_from("ab é€🙂"), min_size=1, max_size=4), max_size=3)


def check_stream(tokenizer, ids, stops, sizes, unstopped):
    count, wanted = expected(tokenizer, ids, stops, unstopped)
    decoder, shown, start = text.StreamDecoder(tokenizer, stops, unstopped), "", 0
    for size in sizes * (len(ids) + 1):
        if start >= len(ids) or decoder.stopped:
            break
        start += size
        shown += decoder.push(ids[start - size : start], final=start >= len(ids))
        assert wanted.startswith(shown)
    assert shown == wanted
    assert decoder.stopped == (count is not None)
    if count is not None:
        assert decoder.count == count


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    content=st.text(st.sampled_from("ab é€🙂"), max_size=16),
    stops=STOPS,
    sizes=st.lists(st.integers(1, 6), min_size=1),
    unstopped=st.sampled_from([0, 0, 3]),
)
def test_stream_ends_before_the_first_stop(byte_tokenizer, content, stops, sizes, unstopped):
    check_stream(byte_tokenizer, byte_tokenizer.encode(content), stops, sizes, unstopped)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    picks=st.lists(st.integers(0, 10**6), max_size=12),
    stops=STOPS,
    sizes=st.lists(st.integers(1, 6), min_size=1),
    unstopped=st.sampled_from([0, 0, 1, 3]),
)
def test_stream_of_tokens_that_end_within_characters(
    merged_tokenizer, picks, stops, sizes, unstopped
):
    tokenizer, ids = merged_tokenizer
    check_stream(tokenizer, [ids[pick % len(ids)] for pick in picks], stops, sizes, unstopped)


def test_text_before_half_a_character_is_shown(merged_tokenizer):
    tokenizer, ids = merged_tokenizer
    half = next(i for i in ids if text.decode(tokenizer, [i]) == "a" + text.REPLACEMENT)
    assert text.StreamDecoder(tokenizer).push([half]) == "a"


def options(mode, **changes):
    base = dict(mode=mode, tree_budget=15, max_new_tokens=40, stop_ids=())
    return Options(**base | changes)


@pytest.mark.parametrize(
    ("mode", "ahead"), [rarely("ar", 0), rarely("dflash", 0), ("ddtree", 0), ("ddtree", 2)]
)
def test_every_place_of_a_text_as_its_stop(engine, monkeypatch, mode, ahead):
    """Within and across tokens and blocks; two rows, so that others go on behind an ended one.

    Rounds that were dispatched before the host saw the stop change nothing.
    """

    def run(*arguments):
        new = engines._Run(*arguments)
        new.run_ahead = ahead
        return new

    monkeypatch.setattr(Engine, "run", lambda self, *given: run(self, *given).events())
    tokenizer = engine.tokenizer
    whole = tokenizer.decode(BEST, skip_special_tokens=True)
    stops = [(whole[i : i + 2], "never there") for i in range(0, len(whole) - 1, 3)]
    stops += [(whole[5:6], whole[3:6]), (whole[7:12],), ("no such text",)]
    # Half a character is no text to stop at.
    stops = [each for each in stops if text.REPLACEMENT not in "".join(each)]
    asked = [options(mode, stop=each, log_probs=True) for each in stops]
    results: dict[int, tuple] = {}
    for event, result in engine.run([PROMPT] * len(stops), asked):
        _, shown, decoder = results.get(
            event.index, (None, "", text.StreamDecoder(tokenizer, asked[event.index].stop))
        )
        shown += decoder.push(event.tokens, final=event.done)
        results[event.index] = (result, shown, decoder)
    lengths = set()
    for index, stop in enumerate(stops):
        result, shown, _ = results[index]
        count, wanted = expected(tokenizer, BEST, stop)
        assert result.output_ids == BEST[:count]
        assert engine.with_text(result).text == shown == wanted
        assert result.finish_reason == ("length" if count is None else "stop")
        assert len(result.output_ids) == 1 + sum(result.accept_lengths)
        assert len(result.log_probs) == len(result.output_ids)
        lengths.add(len(result.output_ids))
    assert len(lengths) > 8


def test_no_stop_before_the_minimum(engine):
    tokenizer = engine.tokenizer
    whole = tokenizer.decode(BEST, skip_special_tokens=True)
    stop = (whole[4:6],)
    early, _ = expected(tokenizer, BEST, stop)
    count, wanted = expected(tokenizer, BEST, stop, early)
    (result,) = engine.generate([PROMPT], options("ddtree", stop=stop, min_new_tokens=early))
    assert (result.output_ids, result.text) == (BEST[:count], wanted)


def test_stop_strings_need_a_tokenizer():
    plain = ddtree_jax.load(
        ORACLE / NAME / "target", ORACLE / NAME / "draft", dtype="float32", tokenizer=False
    )
    with pytest.raises(ddtree_jax.InputError, match="need a tokenizer"):
        plain.generate([PROMPT], options("ddtree", stop=("x",)))


def test_streamed_api(engine):
    whole = "".join(ddtree_jax.stream(engine, PROMPT, max_new_tokens=30, stop_ids=()))
    stop = (whole[10:13],)
    changes = dict(max_new_tokens=30, stop_ids=(), stop=stop)
    shown = "".join(ddtree_jax.stream(engine, PROMPT, **changes))
    assert shown == ddtree_jax.generate(engine, PROMPT, **changes).text
    assert shown == whole[: whole.find(stop[0])]
    with pytest.raises(ddtree_jax.InputError, match="n is 2"):
        ddtree_jax.generate(engine, PROMPT, n=2)
