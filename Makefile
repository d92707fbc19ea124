# make serve      start the server (the first time it sets .venv up)
# make test       run all tests
# make check      format, lint, types, import contracts, sizes
# make clean      delete caches; make distclean deletes .venv as well
#
# Settings: make serve MODEL=./my-model HOST=0.0.0.0 PORT=9000 ARGS="--max-num-seqs 16"
#           make test ARGS="tests/unit -k cache"
#           PYTHON=/path/to/python3.11 chooses the interpreter that .venv is made with

MODEL ?= smollm2-135m-instruct
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
export PYTHON

.PHONY: serve test check setup clean distclean

serve: setup
	@exec .venv/bin/octavo serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

setup:
	@scripts/setup runtime

test:
	@scripts/setup dev
	@scripts/test $(ARGS)

check:
	@scripts/setup dev
	@scripts/check

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
