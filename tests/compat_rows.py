"""Every public name, option and behaviour of ORTModule 1.19.2, what it is here, and the test that shows it.

python tests/compat_rows.py > docs/COMPATIBILITY.md
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from expected import EXPECTED

ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    """kept: same, better or no. text: what differs, how it is better, or why it is not kept. test: file (without .py)
    and function."""

    name: str
    kept: str
    text: str
    test: str


SAME, BETTER, NO = "same", "better", "no"
SECTIONS: dict[str, list[Row]] = {
    "Imports": [
        Row("import paths", SAME, "all modules of the table in `ortmodule/compat/names.py`, served when they are not installed", "test_served_names::test_every_name_is_there"),
        Row("`torch_ort`, `onnxruntime.training.ORTModule`, `onnxruntime.training.ortmodule.ORTModule`", SAME, "one class", "test_served_names::test_names_are_one_object_everywhere"),
        Row("old scripts", SAME, "`python -m ortmodule.compat train.py`, or one import added", "test_served_names::test_an_old_script_runs_unchanged"),
        Row("in processes that are spawned", SAME, "", "test_schedules_training_compat::test_familiar_imports_in_spawned_processes"),
        Row("onnxruntime for inference", BETTER, "stays installed beside", "test_served_names::test_onnxruntime_for_inference_stays_beside"),
        Row("an installed onnxruntime-training", BETTER, "wins, and nothing is added to it", "test_served_names::test_an_installed_onnxruntime_training_is_never_shadowed"),
        Row("importing patches `torch.manual_seed`, `torch.cuda.manual_seed`, `torch.utils.checkpoint.checkpoint`", BETTER, "nothing of PyTorch is replaced: seeds come from its generators", "test_wrapper_members::test_importing_replaces_nothing_of_pytorch"),
        Row("`set_seed`", SAME, "seeds torch's generators, from which dropout draws; where onnxruntime is installed, `onnxruntime.set_seed` is its own and reaches only onnxruntime's", "test_served_names::test_without_any_onnxruntime"),
        Row("`ORTMODULE_FALLBACK_POLICY`, `ORTMODULE_FALLBACK_RETRY` assigned through the module", SAME, "", "test_served_names::test_constants_are_assigned_through_the_module"),
        Row("`ONNX_OPSET_VERSION`, `MINIMUM_RUNTIME_PYTORCH_VERSION_STR`, `ORTMODULE_TORCH_CPP_DIR`, `ONNXRUNTIME_CUDA_VERSION`, `ONNXRUNTIME_ROCM_VERSION`, `export_context`", SAME, "what holds here; files are written in one opset", "test_served_names::test_every_name_is_there"),
        Row("`PropagateCastOpsStrategy`, `TrainingParameters`, `is_ortmodule_available`", SAME, "names alone: casts are the engine's", "test_served_names::test_every_name_is_there"),
        Row("`python -m ...torch_cpp_extensions.install`, `torch_ort.configure`", BETTER, "nothing is compiled: checks extension, PyTorch and a training step, and says what fails", "test_served_names::test_the_install_step_is_a_check"),
        Row("a name that is not there", BETTER, "the error has the nearest, or what to do instead", "test_served_names::test_what_is_not_served_says_what_to_do"),
    ],
    "ORTModule": [
        Row("`ORTModule(module, debug_options=None)`", SAME, "also options by keyword", "test_ortmodule::test_identity_of_the_wrapper"),
        Row("what is no module", SAME, "`ORTModuleTorchModelException`, which is a `TypeError` too", "test_policies::test_exceptions_are_of_one_family"),
        Row("`forward`'s signature", SAME, "", "test_ortmodule::test_identity_of_the_wrapper"),
        Row("nothing is exported before the first call", SAME, "", "test_wrapper_members::test_nothing_is_captured_before_the_first_call"),
        Row("`module`", SAME, "", "test_ortmodule::test_children_called_module_and_report"),
        Row("`isinstance(model, type(module))`", BETTER, "the wrapper is also of the user's class", "test_ortmodule::test_identity_of_the_wrapper"),
        Row("`train`, `eval`, `no_grad`", SAME, "a capture for each", "test_modes::test_train_eval_no_grad_inference"),
        Row("`state_dict`, `load_state_dict`, `parameters`, `buffers`, `modules`, `children` and their named forms", SAME, "the module's own, without prefix", "test_wrapper_members::test_methods_and_modes_reach_the_module"),
        Row("`to`, `half`, `double`", SAME, "captured again", "test_changes::test_module_converted_to_another_dtype"),
        Row("attributes are written to the module", SAME, "captured again only when forward reads the attribute", "test_changes::test_attribute_that_forward_does_not_read_costs_no_capture"),
        Row("the user's methods run through the wrapper", SAME, "also those that call each other", "test_ortmodule::test_methods_of_the_user_run_through_the_engine"),
        Row("names that collide are warned about", SAME, "once", "test_wrapper::test_attributes_of_the_same_name_are_told_once"),
        Row("a wrapper inside a module, and `_load_from_state_dict`", SAME, "its nodes are part of the outer graph", "test_wrapper::test_wrappers_inside_a_module"),
        Row("`add_module` raises", BETTER, "works; the next call captures again", "test_wrapper_members::test_modules_parameters_and_buffers_may_be_added"),
        Row("`register_buffer`, `register_parameter`, `get_parameter`, `get_buffer`", SAME, "", "test_wrapper_members::test_modules_parameters_and_buffers_may_be_added"),
        Row("pickle, `copy.deepcopy`", SAME, "", "test_ortmodule::test_copies_are_wrapped_and_on_their_own"),
        Row("subclasses", BETTER, "`super().forward` is the engine", "test_wrapper::test_subclasses_of_ortmodule"),
        Row("DataParallel", BETTER, "runs in PyTorch with a warning; FALLBACK_DISABLE raises", "test_policies::test_data_parallel_runs_in_pytorch_with_a_warning"),
        Row("DistributedDataParallel around it", SAME, "all-reduce overlaps with backward", "test_ddp::test_ranks_train_as_in_eager"),
        Row("hooks on submodules", BETTER, "run as in PyTorch, between parts of the graph; there they were traced away", "test_hooks::test_what_hooks_do"),
        Row("`torch.utils.checkpoint`", BETTER, "captured; there an error with three remedies", "test_surroundings::test_checkpoint_and_saved_tensor_hooks"),
        Row("a process that is spawned", SAME, "trains the wrapper it is given; captured there", "test_named_and_spawned::test_a_wrapped_model_trains_in_a_spawned_process"),
        Row("Hugging Face Trainer, Accelerate", SAME, "", "test_trainers::test_hugging_face_trainer"),
        Row("PEFT, before and after wrapping", SAME, "its test runs where PEFT is installed", "test_trainers::test_peft_in_both_orders"),
        Row("TRL", BETTER, "the backbone that its forward calls enters the engine; examples/trl_trainers.py runs where TRL is installed", "test_bypassed::test_a_replaced_forward_that_calls_the_backbone"),
        Row("mistakes", BETTER, "PyTorch's error, word for word; those about ORTModule say what to do", "test_mistakes::test_the_error_is_pytorchs"),
        Row("guides", BETTER, "every block is run", "test_pages::test_what_a_guide_says"),
    ],
    "Arguments and results": [
        Row("tensors, None, str, int, bool, float, sequences, mappings, keyword arguments", SAME, "", "test_training::test_nested_arguments_and_results"),
        Row("int and float change without another export", SAME, "after one more capture at the second value", "test_changes::test_numbers_as_arguments"),
        Row("other classes raise ORTModuleIOError", BETTER, "dataclasses and objects of any class are arguments and results", "test_any_object::test_is_as_in_eager"),
        Row("numpy arrays (newest)", BETTER, "constants of the capture, whose values are compared at every call; what changes from batch to batch is better a tensor", "test_any_object::test_the_engine_runs"),
        Row("results of other classes raise", BETTER, "rebuilt", "test_wrapper::test_results_of_any_type"),
        Row("Hugging Face's ModelOutput", SAME, "", "test_surroundings::test_hugging_face_output_and_generate"),
        Row("tensor subclasses, nested tensors", SAME, "FALLBACK_UNSUPPORTED_DATA: PyTorch, or ORTModuleIOError", "test_policies::test_a_flag_leaves_its_category_to_pytorch_and_no_other"),
        Row("sizes change without another export", SAME, "one capture more, with symbols", "test_changes::test_new_shapes_cost_one_more_capture"),
        Row("channels_last", BETTER, "results have eager's order of memory; there they were contiguous", "test_flags::test_channels_last"),
        Row("non-contiguous tensors", SAME, "not copied", "test_surroundings::test_non_contiguous_and_expanded"),
        Row("unused arguments", SAME, "", "test_wrapper_members::test_arguments_that_are_not_used"),
        Row("arguments that are results", SAME, "also views of them", "test_training::test_outputs_that_are_inputs"),
        Row("changes after the first step are not noticed (SKIPCHECK)", BETTER, "every check at every call, in microseconds", "test_changes::test_change_after_the_first_step_takes_effect"),
    ],
    "Autograd": [
        Row("`grad_fn` of a result is `_ORTModuleFunctionBackward`", NO, "`HeadBackward`: a model is a chain of nodes, one for each segment", "test_named_and_spawned::test_the_node_of_autograd_is_one_of_the_engines"),
        Row("gradient None for what is not used", SAME, "also through the graph", "test_functions::test_unused_experts_get_none"),
        Row("outputs that need no gradient are marked", SAME, "", "test_training::test_output_without_a_path_does_not_require_grad"),
        Row("an output edited before backward is an error", SAME, "PyTorch's own", "test_training::test_output_that_backward_reads_modified_in_place"),
        Row("several forwards before a backward, in any order", SAME, "", "test_training::test_accumulation_and_order_of_backwards"),
        Row("gradients of arguments", SAME, "", "test_training::test_gradients_of_some_inputs"),
        Row("gradients of some outputs", SAME, "", "test_training::test_outputs_that_receive_gradients"),
        Row("a second backward (`retain_graph`)", BETTER, "works; there the state was gone", "test_training::test_retain_graph_and_second_backward"),
        Row("second-order gradients", BETTER, "work; there an error", "test_training::test_second_order_gradients"),
        Row("freezing and unfreezing", SAME, "noticed at once", "test_training::test_frozen_and_unfrozen"),
        Row("tied weights", SAME, "", "test_training::test_tied_weights"),
        Row("custom autograd.Function (PythonOp)", SAME, "always on; `infer_shape` and `alias_input` of the class are not asked", "test_models::test_custom_function_keeps_its_backward"),
        Row("a Function that returns memory of its argument", SAME, "called on the argument itself, behind the graph, when the result leaves forward", "test_function_memory::test_pointer_type"),
        Row("a Function that edits its input, or returns its memory beside a second reader of the result", NO, "the submodule around it runs in PyTorch, by name; under FALLBACK_DISABLE that is an error", "test_functions::test_functions_that_edit_their_input_stay_in_pytorch"),
        Row("an operator without gradient is an error", BETTER, "PyTorch runs and differentiates it inside the graph", "test_left_to_pytorch::test_host_nodes"),
        Row("an exception in backward (a Function's, a hook's)", BETTER, "the user's own, under every policy; there ORTModuleFallbackException around it", "test_failing_backward::test_an_exception_in_backward"),
        Row("no memory in backward", SAME, "an error of PyTorch's class and words, which is a `MemoryError` too; the model is usable", "test_failing_backward::test_no_memory_in_backward"),
        Row("random state is left alone by an export", SAME, "", "test_modes::test_capture_leaves_random_state_alone"),
        Row("`torch.autocast`", SAME, "as it was captured, and again when it changes", "test_modes::test_autocast_on_and_off"),
    ],
    "Fallback": [
        Row("`_FallbackPolicy` and its eight flags", SAME, "also public: `ortmodule.FallbackPolicy`", "test_policies::test_flags_are_onnxruntimes"),
        Row("the default policy", BETTER, "has FALLBACK_BAD_INITIALIZATION too: on a PyTorch it does not know the model trains in PyTorch, with a warning", "test_policies::test_initialization"),
        Row("FALLBACK_DISABLE", SAME, "forbids a submodule's or the model's, not custom Functions or operators inside the graph", "test_policies::test_disable_leaves_functions_and_operators_inside_the_graph_alone"),
        Row("FALLBACK_UNSUPPORTED_DATA, _DEVICE, _TORCH_MODEL, _ONNX_MODEL", SAME, "each by itself", "test_policies::test_a_flag_leaves_its_category_to_pytorch_and_no_other"),
        Row("FALLBACK_FORCE_TORCH_FORWARD, _BACKWARD", SAME, "any category; neither forces PyTorch where nothing fails (ORTMODULE_DISABLE does)", "test_policies::test_forced_and_default_policies_leave_all_to_pytorch"),
        Row("`ORTModuleFallbackException` and its five classes, `wrap_exception`", SAME, "", "test_policies::test_exceptions_are_of_one_family"),
        Row("what an unsupported part costs", BETTER, "one operator or submodule goes to PyTorch, there the whole model", "test_left_to_pytorch::test_submodule_left_to_pytorch"),
        Row("FALLBACK_RETRY", SAME, "", "test_policies::test_retry_tries_to_capture_at_every_call"),
        Row("a share that must run in the engine", BETTER, "`min_coverage`", "test_min_coverage::test_operators_in_pytorch_count_as_one"),
        Row("errors of the user's forward", BETTER, "are the user's own, under every policy", "test_wrapper::test_the_users_own_errors_are_the_users"),
        Row("an error of the engine in a step is raised", BETTER, "PyTorch repeats the call; its error is the one that is seen", "test_wrapper::test_an_index_out_of_range_is_pytorchs_error"),
        Row("what fell back and why", BETTER, "`model.report()` by file and line", "test_left_to_pytorch::test_host_nodes"),
        Row("`HierarchicalORTModule`", BETTER, "every ORTModule does it, in one graph; the class keeps its names of parameters", "test_hierarchical_and_json::test_hierarchical"),
    ],
    "DebugOptions and logging": [
        Row("`DebugOptions(log_level, save_onnx, onnx_prefix, save_path, config)`", SAME, "what it refuses, too", "test_debug_options::test_what_is_refused_when_the_options_are_made"),
        Row("`.logging`, `.save_onnx_models`, `.torch_exporter_filter`, `.onnxruntime_log_filter`", SAME, "no message is filtered", "test_debug_options::test_members"),
        Row("`LogLevel`", SAME, "the values are logging's", "test_debug_options::test_members"),
        Row("`<prefix>_torch_exported_<mode>.onnx`", SAME, "standard ONNX, arguments by their names; later captures have a number", "test_debug_options::test_names_of_arguments_are_kept"),
        Row("`_optimized_pre_grad_`, `_optimized_`, `_execution_model_`", SAME, "the engine's operators in a domain of their own, for viewers; the last two are one graph", "test_debug_options::test_files_of_every_stage"),
        Row("feature table, times", SAME, "at INFO, with the planned memory; there at WARNING", "test_debug_options::test_info_prints_features_times_and_memory_once"),
        Row("densities of labels and of tokens, at INFO", SAME, "its words; of every loss and embedding whose input comes of arguments, on or off by what the engine does", "test_densities::test_density_of_labels"),
        Row("rank 0 alone speaks at INFO and above", SAME, "but for errors", "test_debug_options::test_other_ranks_keep_silent"),
        Row("logger `orttraining`", BETTER, "`ortmodule`, the same on all ranks", "test_ortmodule::test_report_and_log"),
        Row("the exporter's output is captured and filtered", BETTER, "an attempt that fails prints nothing", "test_wrapper_members::test_a_capture_that_fails_prints_nothing"),
    ],
    "Options": [
        Row("environment variables", SAME, "docs/SETTINGS.md has all of them: same, nearest, or not kept and why", "test_debug_options::test_every_variable_is_taken_or_named"),
        Row("an unknown variable", BETTER, "is named with the nearest that is known", "test_debug_options::test_an_unknown_variable_names_the_nearest"),
        Row("`load_from_json` and its keys", SAME, "FallbackPolicy and DebugOptions act; the others are checked, and named", "test_hierarchical_and_json::test_json_keys_of_parts_that_are_not_here"),
        Row("ORTMODULE_MEMORY_OPT_LEVEL", SAME, "1: transformer layers are computed again", "test_memory_level::test_same_bits_less_memory"),
        Row("ORTMODULE_MEMORY_OPT_CONFIG", SAME, "clusters are named by the engine's operators", "test_memory_table::test_a_file_says_what_is_computed_again"),
        Row("ORTMODULE_CACHE_DIR", NO, "a capture takes about a second", "test_debug_options::test_every_variable_is_taken_or_named"),
        Row("Triton, tuning", NO, "kernels are compiled beforehand, chosen by machine and sizes", "test_debug_options::test_every_variable_is_taken_or_named"),
        Row("`register_graph_optimizer`, `GraphOptimizerRegistry`: module classes, devices, priority, an edited GraphProto", SAME, "of a training capture", "test_registered::test_graph_optimizers_are_chosen_by_class_device_and_priority"),
        Row("a graph optimizer sees the gradient graph", NO, "it sees the graph before it is differentiated: the gradient is the engine's, of what the optimizer leaves", "test_registered::test_register_graph_optimizer_rewrites_before_gradients"),
        Row("`register_gradient` of a torch operator", SAME, "nodes of ONNX and ATen; the operator runs in PyTorch inside the graph", "test_registered::test_register_gradient_of_onnx_nodes"),
        Row("`CustomGradientRegistry.register_custom_stop_gradient_edges`", SAME, "", "test_registered::test_edges_that_stop"),
        Row("`register_gradient` of an ONNX operator", NO, "the engine's own; refused, with the way by torch.autograd.Function", "test_registered::test_a_gradient_that_is_refused"),
        Row("`register_symbolic`, `CustomOpSymbolicRegistry`", SAME, "ONNX operators and org.pytorch.aten::ATen", "test_registered::test_register_symbolic_of_an_operator_without_a_row"),
        Row("`torch.onnx.register_custom_op_symbolic`", BETTER, "is for files: PyTorch runs and differentiates the operator inside the graph, so a symbolic that was written for inference changes no training; the report names `register_symbolic`, which gives it to the engine", "test_registered::test_a_symbolic_of_torch_onnx_changes_no_training_and_is_named"),
        Row("a symbolic with operators of a custom-op library", BETTER, "such a library cannot be loaded: PyTorch runs the torch operator, and the report says why", "test_registered::test_a_symbolic_that_the_engine_cannot_take_leaves_the_operator_to_pytorch"),
        Row("`enable_custom_autograd_support(False)`", NO, "Functions are never inlined; says so once", "test_served_names::test_functions_cannot_be_inlined_and_that_is_said_once"),
        Row("ZeRO stage 3, `configure_ort_compatible_zero_stage3`, `ZeROOffloadSubscriber`", NO, "ZeRO-3 needs no preparation: wrap the blocks (DISTRIBUTED.md); the name says so", "test_served_names::test_what_is_not_served_says_what_to_do"),
        Row("`ORTPipelineModule`", BETTER, "a rank's layers are one graph, tied layers and functions among them", "test_deepspeed_pipeline::test_stages"),
    ],
    "Utilities": [
        Row("`extract_data_and_schema`, `unflatten_data_using_schema`, `PrimitiveType`", SAME, "", "test_utilities::test_schemas"),
        Row("`pytorch_type_to_onnx_dtype`, `onnx_dtype_to_pytorch_dtype`, `pytorch_scalar_type_to_pytorch_dtype`", SAME, "", "test_utilities::test_dtypes"),
        Row("`PTable`, `log_memory_usage`, nvtx functions", SAME, "without CUDA, the process's memory", "test_utilities::test_tables_and_memory"),
        Row("`GlobalSubscriberManager`, `SubscriberBase`", SAME, "subscribing again takes the old hooks away", "test_subscribers::test_subscribers_of_ones_own"),
        Row("`StatisticsSubscriber`", SAME, "the same files; moments in fp64", "test_subscribers::test_the_same_files_in_pytorch_and_in_the_engine"),
        Row("`inspect_activation`", SAME, "", "test_subscribers::test_the_same_files_in_pytorch_and_in_the_engine"),
        Row("`merge_activation_summary`", SAME, "", "test_subscribers::test_merged_files_follow_the_order_of_pytorch"),
        Row("`LoadBalancingDistributedSampler`", SAME, "the complexities are asked for once", "test_load_balancing::test_every_sample_is_given"),
        Row("`LoadBalancingDistributedBatchSampler`", SAME, "", "test_load_balancing::test_batches"),
        Row("`export_gradient_graph`", SAME, "PyTorch differentiates; operators without standard form are refused by name", "test_utilities::test_a_gradient_graph_runs_in_onnxruntime"),
    ],
    "Optimizers and training on a device": [
        Row("`FusedAdam`, `AdamWMode`", BETTER, "also on the CPU, and in bf16", "test_optimizers::test_adam_object_matches_reference"),
        Row("`FP16_Optimizer`", BETTER, "works by itself, and around the wrappers it knew", "test_fp16::test_steps_are_f32_steps_on_unscaled_gradients"),
        Row("learning-rate schedules", SAME, "", "test_schedules_training_compat::test_schedules"),
        Row("`DynamicLossScaler`", SAME, "", "test_fp16::test_dynamic_loss_scaler"),
        Row("`AdamConfig`, `LambConfig`, `SGDConfig`", SAME, "fields by keyword; groups of parameters are torch's", "test_schedules_training_compat::test_trainer_is_the_loop_it_says"),
        Row("`artifacts.generate_artifacts`", SAME, "", "test_artifacts::test_losses"),
        Row("`api.Module`, `Optimizer`, `CheckpointState`, `LinearLRScheduler`", SAME, "", "test_trainer::test_checkpoint_continues"),
        Row("`onnxblock` blocks and losses", SAME, "", "test_artifacts::test_own_loss"),
        Row("`onnxblock.ForwardBlock`, `TrainingBlock`, `base`, `optim`, `save_checkpoint`", NO, "the gradient is derived on the device; the name says what to do", "test_served_names::test_what_is_not_served_says_what_to_do"),
    ],
}  # fmt: skip


@cache
def tests() -> dict[str, str]:
    """file::function -> its path from docs/."""
    found = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.stem}::{node.name}"] = f"../{path.relative_to(ROOT)}#L{node.lineno}"
    return found


_KEPT = {SAME: "same", BETTER: "better", NO: "not kept"}


def doc() -> str:
    rows = [row for part in SECTIONS.values() for row in part]
    counts = {kept: sum(row.kept == kept for row in rows) for kept in _KEPT}
    lines = [
        "# ORTModule 1.19.2 and this one",
        "",
        f"Every public name, option and behaviour: {counts[SAME]} the same, {counts[BETTER]} better, {counts[NO]} not kept. "
        "Each row has the test that shows it.",
        "Generated by `python tests/compat_rows.py`; environment variables are in docs/SETTINGS.md.",
    ]
    for title, part in SECTIONS.items():
        lines += ["", f"## {title}", "", "| ORTModule 1.19.2 | here | how, or why | test |", "|---|---|---|---|"]
        for row in part:
            path = tests().get(row.test, "")
            name = row.test.partition("::")[2]
            lines.append(f"| {row.name} | {_KEPT[row.kept]} | {row.text} | [{name}]({path.partition('#')[0]}) |")
    lines += ["", "## Beside the names", "", "| | what is expected | test |", "|---|---|---|"]
    for title, expected in EXPECTED.items():
        for what, test in expected:
            path = tests().get(test, "").partition("#")[0]
            lines.append(f"| {title} | {what} | [{test.partition('::')[2]}]({path}) |")
            title = ""
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(doc(), end="")
