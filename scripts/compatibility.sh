#!/usr/bin/env bash
# compatibility.sh FOLDER REQUIREMENT...: run the tests that another release of torch or transformers breaks first, in a new
# environment FOLDER with these requirements, for example torch==2.11.0 transformers==5.17.0. All other packages are those
# of `python`, found behind its own. Exits with 3 if the requirements cannot be installed. SMOKE_ONLY=1 ends after the
# smoke tests. Used by .ci/run, the workflow and scripts/new_release.py.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
folder=$1
packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
python -m venv "$folder"
"$folder/bin/pip" install -q --disable-pip-version-check "${@:2}" || exit 3
echo "import site; site.addsitedir('$packages')" >"$(echo "$folder"/lib/python3*/site-packages)/others.pth"
"$folder/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'

failed=0
check() {  # NAME, then arguments of pytest
    echo "== $1"
    "$folder/bin/python" -m pytest -n 2 "${@:2}" || failed=1
}
check smoke -m smoke
[ -z "${SMOKE_ONLY:-}" ] || exit $failed
check "parity, pipelining, sampler, dry run, export, pictures" -m "not nightly" \
    tests/dist/test_{parity,pipeline}.py tests/unit/models/document_masking/test_dynamic_rope.py \
    tests/unit/pipelining/cut/test_stage_module.py \
    tests/unit/rollout/engines/sampler/test_sampler{,_hybrids}.py tests/unit/rollout/engines/test_transformers_engine.py \
    tests/dryrun/test_{tiny,memory}.py \
    tests/unit/models/checkpoint_io/test_{load,export_check}.py tests/unit/models/test_packing_support.py \
    tests/unit/models/vision/test_front.py
exit $failed
