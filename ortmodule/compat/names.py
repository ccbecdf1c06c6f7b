"""Which module serves which names: the whole of onnxruntime-training 1.19.2 that scripts import, and torch-ort.

NAMES: served module -> {name: "home" (a module) or "home:name there"}. A package also has the rows below it as
attributes; "__main__" is what `python -m` of the module runs. Private names stand here where scripts or
onnxruntime-training's own samples and tests import them.
MISSING: public names that are not served, and what to do.
"""

from __future__ import annotations

_OPTIM = "ortmodule.optim"
_TRAINING = "onnxruntime.training"
_ORTMODULE = f"{_TRAINING}.ortmodule"
_HERE = "ortmodule.compat"


def _rows(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_SCHEDULES = (
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
)
_EXCEPTIONS = (
    "ORTModuleFallbackException",
    "ORTModuleInitException",
    "ORTModuleDeviceException",
    "ORTModuleIOError",
    "ORTModuleTorchModelException",
    "ORTModuleONNXModelException",
    "wrap_exception",
)
_CONFIG = _rows("ortmodule.config", "DebugOptions", "LogLevel")
_ORT = _rows("ortmodule.module", "ORTModule")
_BLOCKS = (
    "Block", "PassThrough", "Add", "Sub", "Mul", "Div", "Pow", "Sigmoid", "Log", "Neg", "Abs", "ReduceMean",
    "ReduceSum", "Constant", "Cast", "InputLike")  # fmt: skip
_IO = (
    "PrimitiveType",
    "ORTModelInputOutputType",
    "ORTModelInputOutputSchemaType",
    "extract_data_and_schema",
    "unflatten_data_using_schema",
)
_TYPES = ("pytorch_type_to_onnx_dtype", "onnx_dtype_to_pytorch_dtype", "pytorch_scalar_type_to_pytorch_dtype")
_PROFILE = ("torch_nvtx_range_push", "torch_nvtx_range_pop", "nvtx_function_decorator", "log_memory_usage")
_HOOKS = ("StatisticsSubscriber", "GlobalSubscriberManager", "inspect_activation")
_SAMPLERS = ("LoadBalancingDistributedSampler", "LoadBalancingDistributedBatchSampler")
_OPTIMIZERS = {
    **_rows(_OPTIM, "AdamWMode", "FusedAdam", "FusedLAMB", "FP16_Optimizer", *_SCHEDULES),
    **_rows("ortmodule.training", "AdamConfig", "LambConfig", "SGDConfig"),
}

NAMES: dict[str, dict[str, str]] = {
    "onnxruntime": {"set_seed": f"{_HERE}.seed:set_seed", "__version__": f"{_HERE}.build:ONNXRUNTIME_VERSION"},
    _TRAINING: {
        **_ORT,
        **_rows(f"{_HERE}.build", "PropagateCastOpsStrategy", "TrainingParameters", "is_ortmodule_available"),
    },
    _ORTMODULE: {
        **_ORT,
        **_CONFIG,
        **_rows(
            f"{_HERE}.build",
            "ONNX_OPSET_VERSION",
            "MINIMUM_RUNTIME_PYTORCH_VERSION_STR",
            "ORTMODULE_TORCH_CPP_DIR",
            "ORTMODULE_IS_DETERMINISTIC",
            "ORTMODULE_ONNX_EXPORT_CONTEXT",
            "ONNXRUNTIME_CUDA_VERSION",
            "ONNXRUNTIME_ROCM_VERSION",
            "export_context",
            "_defined_from_envvar",
        ),
        **_rows("ortmodule.capture.registered", "register_graph_optimizer"),
        **_rows("ortmodule.fallback", "ORTMODULE_FALLBACK_POLICY", "ORTMODULE_FALLBACK_RETRY"),
    },
    f"{_ORTMODULE}.ortmodule": _ORT,
    f"{_ORTMODULE}.options": {
        **_CONFIG,
        "_SkipCheck": "ortmodule.config:SkipCheck",
        "_FallbackPolicy": "ortmodule.fallback:FallbackPolicy",
    },
    f"{_ORTMODULE}._fallback": {
        "_FallbackPolicy": "ortmodule.fallback:FallbackPolicy",
        **_rows("ortmodule.fallback", *_EXCEPTIONS),
    },
    f"{_ORTMODULE}._fallback_exceptions": _rows("ortmodule.fallback", *_EXCEPTIONS),
    f"{_ORTMODULE}._logger": _rows("ortmodule.config", "LogLevel"),
    f"{_ORTMODULE}._custom_autograd_function": _rows(f"{_HERE}.build", "enable_custom_autograd_support"),
    f"{_ORTMODULE}._custom_gradient_registry": _rows(
        "ortmodule.capture.registered", "register_gradient", "CustomGradientRegistry"
    ),
    f"{_ORTMODULE}._custom_op_symbolic_registry": _rows(
        "ortmodule.capture.symbolic", "register_symbolic", "CustomOpSymbolicRegistry"
    ),
    f"{_ORTMODULE}.graph_optimizer_registry": _rows(
        "ortmodule.capture.registered", "register_graph_optimizer", "GraphOptimizerRegistry"
    ),
    f"{_ORTMODULE}.experimental": {},
    f"{_ORTMODULE}.experimental.json_config": _rows(
        "ortmodule.experimental.json_config", "load_from_json", "JSON_PATH_ENVIRONMENT_KEY"
    ),
    f"{_ORTMODULE}.experimental.hierarchical_ortmodule": _rows(
        "ortmodule.experimental.hierarchical_ortmodule", "HierarchicalORTModule"
    ),
    f"{_ORTMODULE}.experimental.pipe": _rows("ortmodule.experimental.pipe", "ORTPipelineModule"),
    f"{_ORTMODULE}.torch_cpp_extensions": _rows("ortmodule.torch_cpp_extensions", "is_installed"),
    f"{_ORTMODULE}.torch_cpp_extensions.install": {
        **_rows("ortmodule.torch_cpp_extensions.install", "build_torch_cpp_extensions"),
        "__main__": "ortmodule.torch_cpp_extensions.install",
    },
    f"{_TRAINING}.experimental": _rows(f"{_HERE}.gradient_graph", "export_gradient_graph"),
    f"{_TRAINING}.experimental.gradient_graph": {},
    f"{_TRAINING}.experimental.gradient_graph._gradient_graph_tools": _rows(
        f"{_HERE}.gradient_graph", "export_gradient_graph"
    ),
    f"{_TRAINING}.utils": {
        **_rows(f"{_HERE}.schema", *_IO),
        **_rows(f"{_HERE}.types", *_TYPES),
        **_rows(f"{_HERE}.profile", *_PROFILE, "PTable"),
    },
    f"{_TRAINING}.utils.torch_io_helper": _rows(f"{_HERE}.schema", *_IO, "_TensorStub"),
    f"{_TRAINING}.utils.torch_type_map": _rows(f"{_HERE}.types", *_TYPES),
    f"{_TRAINING}.utils.torch_profile_utils": _rows(f"{_HERE}.profile", *_PROFILE),
    f"{_TRAINING}.utils.ptable": _rows(f"{_HERE}.profile", "PTable"),
    f"{_TRAINING}.utils.data": _rows(f"{_HERE}.sampler", *_SAMPLERS),
    f"{_TRAINING}.utils.data.sampler": _rows(f"{_HERE}.sampler", *_SAMPLERS, "shard_wrapped_indices_for_worker"),
    f"{_TRAINING}.utils.hooks": _rows(f"{_HERE}.hooks", *_HOOKS),
    f"{_TRAINING}.utils.hooks._statistics_subscriber": _rows(f"{_HERE}.hooks", "StatisticsSubscriber"),
    f"{_TRAINING}.utils.hooks._subscriber_base": _rows(f"{_HERE}.hooks", "RuntimeStates", "SubscriberBase"),
    f"{_TRAINING}.utils.hooks._subscriber_manager": _rows(f"{_HERE}.hooks", "SubscriberManager"),
    f"{_TRAINING}.utils.hooks.merge_activation_summary": {
        **_rows(f"{_HERE}.merge", "generate_summaries_per_step", "main"),
        "__main__": f"{_HERE}.merge",
    },
    f"{_TRAINING}.optim": _OPTIMIZERS,
    f"{_TRAINING}.optim.config": _rows("ortmodule.training", "AdamConfig", "LambConfig", "SGDConfig"),
    f"{_TRAINING}.optim.fused_adam": _rows(_OPTIM, "FusedAdam", "AdamWMode"),
    f"{_TRAINING}.optim.fp16_optimizer": _rows(_OPTIM, "FP16_Optimizer"),
    f"{_TRAINING}.optim.lr_scheduler": _rows(_OPTIM, *_SCHEDULES),
    f"{_TRAINING}.amp": _rows(_OPTIM, "DynamicLossScaler"),
    f"{_TRAINING}.amp.loss_scaler": _rows(_OPTIM, "DynamicLossScaler"),
    f"{_TRAINING}.api": _rows(
        "ortmodule.api", "CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "set_seed"
    ),
    f"{_TRAINING}.artifacts": _rows("ortmodule.artifacts", "LossType", "OptimType", "generate_artifacts"),
    f"{_TRAINING}.onnxblock": _rows("ortmodule.onnxblock", *_BLOCKS),
    f"{_TRAINING}.onnxblock.blocks": _rows("ortmodule.onnxblock", *_BLOCKS),
    f"{_TRAINING}.onnxblock.loss": _rows(
        "ortmodule.onnxblock", "MSELoss", "L1Loss", "CrossEntropyLoss", "BCEWithLogitsLoss"
    ),
    "torch_ort": {**_ORT, **_CONFIG, "set_seed": f"{_HERE}.seed:set_seed"},
    "torch_ort.utils": {},
    "torch_ort.utils.data": _rows(f"{_HERE}.sampler", *_SAMPLERS),
    "torch_ort.optim": _rows(_OPTIM, "FusedAdam", "AdamWMode", "FP16_Optimizer"),
    "torch_ort.configure": {"__main__": "ortmodule.torch_cpp_extensions.install"},
    "torch_ort.experimental": {},
    "torch_ort.experimental.json_config": _rows("ortmodule.experimental.json_config", "load_from_json"),
}

_BLOCK = "write a Block of your own and give it to artifacts.generate_artifacts (docs/ON_DEVICE.md)"
_STAGE3 = "ZeRO-3 needs no preparation: ortmodule.wrap_blocks(model) before deepspeed.initialize (docs/DISTRIBUTED.md)"
MISSING: dict[str, str] = {
    f"{_TRAINING}.onnxblock.ForwardBlock": _BLOCK,
    f"{_TRAINING}.onnxblock.TrainingBlock": _BLOCK,
    f"{_TRAINING}.onnxblock.base": _BLOCK,
    f"{_TRAINING}.onnxblock.empty_base": _BLOCK,
    f"{_TRAINING}.onnxblock.custom_op_library": "the engine loads no libraries of operators",
    f"{_TRAINING}.onnxblock.save_checkpoint": "api.CheckpointState.save_checkpoint writes one",
    f"{_TRAINING}.onnxblock.load_checkpoint_to_model": "api.Module.export_model_for_inferencing writes the model with "
    "its parameters",
    f"{_TRAINING}.onnxblock.optim": "artifacts.generate_artifacts(optimizer=OptimType...) writes the update",
    f"{_TRAINING}.utils.hooks.ZeROOffloadSubscriber": _STAGE3,
    f"{_TRAINING}.utils.hooks.configure_ort_compatible_zero_stage3": _STAGE3,
    f"{_TRAINING}.ort_triton": "the engine has its own kernels and generates none",
}
