"""Tests that `make test` leaves to `make test-full`: each takes ten seconds and more, and what it tries the tests beside
it try as well, with another model, optimizer, number of ranks or moment. A test asked for by name or by file is run."""

from __future__ import annotations

import pytest

FULL: dict[str, list[str]] = {
    "compat/test_served_names.py": [
        "test_an_old_script_runs_unchanged[as a module]", "test_an_old_script_runs_unchanged[with the import added]",
        "test_the_install_step_is_a_check[ortmodule.compat -m onnxruntime.training.ortmodule.torch_cpp_extensions.install]",
        "test_the_install_step_is_a_check[ortmodule.compat -m torch_ort.configure]",
    ],
    "cuda/test_gpu_runner.py": ["test_the_graph_engines_parts"],  # minutes; what it calls has tests of its own in tests/cuda
    "models/test_more_operators.py": ["test_resize[bicubic-True]", "test_resize[bilinear-True]"],
    "models/test_training_examples.py": [
        "[question_answering]", "[seq2seq]", "[vision --net vit]", "[lightning_callback]", "[trl_trainers]", "[trl_trainers --dpo]", "[peft_lora]",
        "[bert_pretraining]", "[bert_pretraining --phase 2]", "test_arms_side_by_side",
    ],
    "module/test_checkpoint.py": [
        "[wide_llama-False]", "[wide_gpt2-True]", "[{'memory_budget': '99%'}]", "[{'segment_mb': 0.01}]", "test_regions_within_regions[False]",
        "test_checkpoint_sequential[False]", "[False-True]", "[True-False]",
    ],
    "module/test_conv_host.py": ["test_who_computes[bfloat16]", "test_errors_with_either[host]"],
    "module/test_left_behind.py": ["[Weights]", "[InObject]", "[Queued]", "[Filled]"],
    "module/test_left_to_pytorch.py": ["[attentions-False]", "[attentions-True]", "[attentions-engine]"],
    "module/test_memory_budget.py": ["[vit]", "[llama]", "[bert]"],
    "module/test_memory_half.py": ["[neox]"],
    "module/test_memory_level.py": ["[t5-25.0]", "[t5-0.01]", "[llama-25.0]"],
    "module/test_padded_batches.py": [
        "[t5-sdpa-False]", "[t5-eager-False]", "[gpt2-eager-False]", "[gpt2-sdpa-True]", "[classifier-eager-False]", "[classifier-sdpa-False]",
        "[bert-sdpa-False]", "[bert-sdpa-True]",
    ],
    "optim/test_in_backward.py": [
        *(f"[engine-{name}]" for name in ("FusedSGD", "AdamW fused", "SGD", "NAdam", "Adafactor")),
        *(f"[many segments-{name}]" for name in ("FusedAdam", "FusedLAMB", "AdamW", "AdamW fused", "SGD", "Adafactor")),
        *(f"[level 1-{name}]" for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "AdamW", "NAdam", "Adafactor")),
        "test_bfloat16_parameters[options0]",
    ],
    "passes/test_attention_models.py": ["test_symbolic_sizes_are_recognised[mistral-window]", "test_symbolic_sizes_are_recognised[gpt2]"],
    "scale/test_ddp_mixed.py": ["[parts,uneven]", "[lengths,twice]"],
    "scale/test_ddp_more.py": ["[hangs]"],
    "scale/test_deepspeed_more.py": ["[2-whole-bf16-4]", "[3-blocks]"],
    "scale/test_deepspeed_peft.py": ["[1]", "[2]"],
    "scale/test_fsdp2_checkpoints.py": ["[around]", "[inside]", "[wrapper around]"],
    "scale/test_gone.py": ["[hangs-load]", "[dies-load]"],
    "scale/test_gone_ranks.py": [
        "[stopped-backward-2-own-4]", "[stopped-forward-0-own-2]", "[killed-backward-0-kept-2]", "[killed-between-0-own-2]", "[killed-forward-1-file-2]",
        "[stopped-uncaught-1-2]", "[killed-uncaught-0-2]", "[stopped-forward-0-2]", "[killed-forward-1-2]", "[stopped-1-2]",
        "test_sharded_blocks_name_the_rank[killed-backward-2-4]", "[stopped-named-2-4]", "[raises-forward-1-own-2]",
    ],
    "scale/test_pipeline.py": ["[ScheduleGPipe]", "[ScheduleLoopedBFS]", "[ScheduleInterleaved1F1B]"],
    "scale/test_skew.py": ["test_first_steps_and_overlap[4]"],
    "scale/test_trainers.py": ["[fp32]"],
    "scale/test_trl.py": ["[sft bf16]"],
}  # fmt: skip


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks them `full`; a row of the table that no test has any more is an error."""
    if all(".py" in arg for arg in config.args):
        return
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(f"{item.path.parent.name}/{item.path.name}", []).append(item)
    for file, rows in FULL.items():
        here = by_file.get(file, [])
        for row in rows:
            found = [item for item in here if item.name == row or item.name.endswith(row) and row[0] == "["]
            assert found or not here, f"tests/full.py: {file} has no test {row}"
            for item in found:
                item.add_marker(pytest.mark.full)
