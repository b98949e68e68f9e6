# Everything runs in .venv in this folder; `make test` and `make demo` need no other step.
VENV := .venv
BIN  := $(VENV)/bin
DONE := $(VENV)/.installed

.PHONY: demo test results lint types unit docs dist lowest audit clean

demo: $(DONE)
	$(BIN)/perlclip demo

test: lint types unit

# Everything the documents show of the toybox; stopped, it goes on. make results ARGS="--jobs 16 --device cuda"
results: $(DONE)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.results $(ARGS)

lint: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DONE)
	$(BIN)/mypy

unit: $(DONE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The site, in build/site: warnings are errors, every link of the pages is looked up, every block that can run is run.
docs: $(DONE) $(VENV)/.docs
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html -d build/doctrees -c docs . build/site
	$(BIN)/python -m scripts.site build/site
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/blocks.py tests/test_docs.py tests/test_api.py tests/cli/test_readme.py

# Wheel and sdist: built, checked, and the wheel tried in an empty environment; then the lowest versions that are allowed.
dist:
	python3 -m scripts.dist

lowest:
	python3 -m scripts.dist --lowest

# Known holes of what is pinned, where their database can be reached.
audit: $(DONE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip_audit --requirement constraints.txt --no-deps --disable-pip

$(DONE): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	# For the test of the page that `perlclip export --format web` writes, which is skipped where there is no npm.
	npm pack --silent --pack-destination $(VENV) onnxruntime-web@1.30.0 >/dev/null 2>&1 || true
	touch $@

$(VENV)/.docs: $(DONE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
