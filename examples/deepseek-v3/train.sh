#!/usr/bin/env bash
# Train on $NODES nodes of 8 GPUs in the loop of Megatron-LM, with the flags of model.flags. See README.md.
set -euo pipefail
# shellcheck source=examples/common/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
