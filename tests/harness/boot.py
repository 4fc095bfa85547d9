"""Builds ServerArgs, PortArgs and a Scheduler the way ``python -m sglang.launch_server`` does.

The launcher's part is Engine._launch_subprocesses itself, stopped at its documented override point,
where it would start processes; the scheduler process's part repeats the body of
sglang/srt/managers/scheduler.py run_scheduler_process (0.5.23), without its SIGQUIT to the parent.
"""

import pickle
from typing import Any

CPU_ARGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "random_seed": 0,
    "log_level": "info",
    # its thread would signal the fork server; the harness has its own limit
    "watchdog_timeout": 86400,
}
# decode in CUDA graphs; prefill graphs take long to capture
GPU_ARGS = {
    **{k: v for k, v in CPU_ARGS.items() if not k.startswith(("device", "cuda_graph"))},
    "dtype": "bfloat16",
    "disable_prefill_cuda_graph": True,
    "mem_fraction_static": 0.5,
}


class _StopBeforeProcesses(BaseException):
    """Carries what the launcher would have given to the scheduler process."""


def command_line(server_args: dict[str, Any]) -> list[str]:
    """Field names to flags: True is a bare flag, False and None leave it out, a list is repeated."""
    argv = []
    for name, value in server_args.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            argv.extend(str(v) for v in value)
        elif value is not True:
            argv.append(str(value))
    return argv


def resolve(model_path: str, server_args: dict[str, Any], instance_id: str, gpu: bool):
    """Plugins, command line, resolution and checks of the launcher -> (ServerArgs, PortArgs)."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    class Launcher(Engine):
        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, *args, **kwargs):
            raise _StopBeforeProcesses(server_args, port_args)

    load_plugins()
    defaults = {"model_path": model_path, **(GPU_ARGS if gpu else CPU_ARGS)}
    args = prepare_server_args(command_line({**defaults, **server_args}))
    try:
        Launcher._launch_subprocesses(
            server_args=args,
            init_tokenizer_manager_func=None,
            run_scheduler_process_func=None,
            run_detokenizer_process_func=None,
        )
    except _StopBeforeProcesses as stop:
        # across a pipe to the scheduler process, as multiprocessing would send them
        args, ports = pickle.loads(pickle.dumps(stop.args))
    ports.instance_id = instance_id
    return args, ports


def build_scheduler(server_args, port_args):
    """What run_scheduler_process does before the event loop, for rank 0 of 1."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    publish(
        server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
    )
    module.configure_scheduler_process(server_args, 0)
    return module.Scheduler(server_args, port_args)
