# Needs Python 3.10 to 3.12, pip and make; sets up .venv by itself. PYTHON=python3.11 chooses another one.
PYTHON ?= python3
TP ?= 2
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo lint test evidence hlo-venv emulator-venv vllm-venv ray-venv clean

demo: $(STAMP)
	$(VENV)/bin/python scripts/compile.py --model tiny --tp $(TP) --seq-len 128 --dtype float32 --device cpu --output artifacts/tiny-demo-tp$(TP)
	$(VENV)/bin/python scripts/validate.py artifacts/tiny-demo-tp$(TP) --device cpu

# the linter and the formatter, configured in pyproject.toml; `ruff check --fix .` and `ruff format .` put right what they can
lint: $(STAMP)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

# FAST=1: what takes about a minute, to run at each change
FAST_TESTS := contrib/models/SmolLM3-3B/test/unit test/nxd_cpu/test_layers.py test/nxd_cpu/test_config.py \
	test/test_shape.py test/test_rooms.py test/test_plan.py test/test_tool_parser.py test/test_preflight.py
test: lint
	$(VENV)/bin/python -m pytest -n auto --dist loadfile $(if $(FAST),$(FAST_TESTS))

# every tier that this machine can run, or TIERS="hlo-0.8.0 ..."; SOURCES="NXD/src:NXDI/src ...", one for each release, and
# VLLM_NEURON="0.4.1=DIR ...", for the tiers that need them. Written to docs/evidence.json and docs/evidence.md
evidence: $(STAMP)
	$(VENV)/bin/python tools/evidence.py $(TIERS) $(SOURCES:%=--source %) $(VLLM_NEURON:%=--vllm-neuron %)

# the compile path without a device, see contrib/neuron_hlo
hlo-venv:
	PYTHON=$(PYTHON) contrib/neuron_hlo/make_venv.sh

# the device path without a device, see contrib/neuron_emulator
emulator-venv: .venv-hlo/.installed
	contrib/neuron_emulator/make_venv.sh

.venv-hlo/.installed: contrib/neuron_hlo/make_venv.sh
	$(MAKE) hlo-venv

# real vLLM beside the model, see SERVING.md
vllm-venv:
	PYTHON=$(PYTHON) TORCH_INDEX="$(TORCH_INDEX)" test/vllm/make_venvs.sh

ray-venv:
	PYTHON=$(PYTHON) TORCH_INDEX="$(TORCH_INDEX)" test/vllm/make_venvs.sh ray

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "error: Python 3.10 to 3.12 is needed, $(PYTHON) is another; run make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: $(PYTHON) cannot make a virtual environment; install its venv module (Debian: python3-venv)" >&2; exit 2; }
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet $(TORCH_INDEX) torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet -e '.[cpu,test]'
	@touch $@

clean:
	rm -rf $(VENV) artifacts build
