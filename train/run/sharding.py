"""Where weights, gradients and optimizer state lie, under every launcher of Accelerate.

Under DDP all is whole in every process. DeepSpeed's ZeRO-2 shares out gradients and optimizer
state, ZeRO-3 and FSDP2 the weights too. Checkpoints are the same under all of them: whole weights,
and the optimizer's state as AdamW has it of whole weights. So a run may go on under another
launcher, or with another number of processes.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, distributed, nn
from torch.distributed.tensor import distribute_tensor
from torch.func import functional_call
from torch.nn import functional
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from headstart.models.batch import Batch, Loss
from headstart.models.drafter import TrainableDrafter

_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, of a parameter's shape


def compile_nothing() -> None:
    """On CPUs, keep DeepSpeed from compiling its exchange by shared memory, which takes minutes and
    a C++ compiler and waits for ever once a compilation was killed: gloo's serves for a trial.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    try:
        import deepspeed.ops
    except ImportError as error:
        raise ValueError(
            "this launcher needs the package deepspeed: pip install 'headstart[deepspeed]'"
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def share_on_cpus() -> None:
    """Have FSDP2 on CPUs: Accelerate 1.15 looks for it on GPUs alone, and would let each process
    train by itself without a word."""
    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU


def configure(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Tell DeepSpeed and FSDP2 what the loop does itself, and to keep master weights in float32.

    Raises:
        ValueError: a launcher that training does not know.
    """
    bf16 = accelerator.mixed_precision == "bf16"
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        if plugin.zero_stage not in (2, 3):
            raise ValueError(
                f"zero_stage is {plugin.zero_stage}; launch with 2 or 3, such as by "
                "--config_file recipes/accelerate/zero2.yaml"
            )
        # Accelerate 1.15 has transformers share out whatever it loads, the verifier too, though
        # zero3_init_flag is false; processes that load one after the other then wait for ever.
        unset_hf_deepspeed_config()
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,  # the loop counts for itself
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
            "bf16": {"enabled": False},  # it would round the weights
            "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
        }
    elif kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"fsdp_version is {plugin.fsdp_version}; launch with 2, such as by "
                "--config_file recipes/accelerate/fsdp2.yaml"
            )
        plugin.mixed_precision_policy = None  # it would round the weights; autocast does not


def in_bf16(accelerator: Accelerator) -> bool:
    """Whether forward passes run under autocast to bfloat16."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.deepspeed_config["torch_autocast"]["enabled"]
    return accelerator.mixed_precision == "bf16"


def autocast(accelerator: Accelerator) -> AbstractContextManager:
    """The forward pass's precision, which Accelerate leaves to DeepSpeed where that runs."""
    return torch.autocast(accelerator.device.type, torch.bfloat16, in_bf16(accelerator))


def shares_weights(accelerator: Accelerator) -> bool:
    """Whether no process has the trained weights whole between two steps."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return kind == DistributedType.FSDP


def check_whole(accelerator: Accelerator, field: str) -> None:
    """Raise a ValueError where `field` needs whole weights in every process."""
    if shares_weights(accelerator):
        raise ValueError(
            f"{field} needs the trained weights whole in every process; launch with DDP or "
            "ZeRO-2 (recipes/accelerate/ddp.yaml, zero2.yaml) or on one process"
        )


class Together(torch.autograd.Function):
    """Weights as they are, whose gradients are all handed on at once; `end` gets one after them."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(end)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(ctx.saved_tensors[0]), *gradients


class Piece(nn.Module):
    """The drafter in one piece: its loss reads all of its weights at once.

    ZeRO-3 reduces gradients and gives weights back as soon as the module's inputs have their own
    gradients: `end` has it last.
    """

    def __init__(self, drafter: TrainableDrafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch, weights: Tensor, end: Tensor) -> Loss:
        names, own = zip(*self.drafter.named_parameters(), strict=True)
        together = dict(zip(names, Together.apply(end, *own), strict=True))
        return functional_call(self.drafter, together, (batch, weights))


class Root(nn.Module):
    """What is given to a launcher that shares out weights, in place of the drafter: FSDP2 splits
    off the last norm of the root."""

    def __init__(self, drafter: TrainableDrafter):
        super().__init__()
        self.piece = Piece(drafter)

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        end = torch.zeros((), device=weights.device, requires_grad=True)
        return self.piece(batch, weights, end)


def total(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if distributed.is_initialized():
        distributed.all_reduce(values)
    return values


def collect(items: list[Any]) -> list[Any]:
    """The items of all processes, in their order."""
    if not distributed.is_initialized():
        return items
    lists: list[list[Any]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(lists, items)
    return list(chain.from_iterable(lists))


class Trained:
    """What the loop trains: `model`, to call, and `optimizer`, both as the launcher wants them.

    The drafter given is whole always: it is the one trained or, where weights are shared out, a
    copy in main memory that `gather` brings up to date.
    """

    def __init__(self, accelerator: Accelerator, drafter: TrainableDrafter, **adamw: Any):
        """`adamw`: settings of the optimizer."""
        self.accelerator, self.drafter, self.trained = accelerator, drafter, drafter
        if shares_weights(accelerator):
            verifier = drafter.verifier
            self.trained = copy.deepcopy(drafter, {id(verifier): verifier})  # which is not ours
            drafter.to("cpu")
        groups = self.trained.parameter_groups()
        self.scales = [group["scale"] for group in groups]
        names = {id(weight): name for name, weight in self.trained.named_parameters()}
        order = [names[id(weight)] for group in groups for weight in group["params"]]
        optimizer = torch.optim.AdamW([{"params": group["params"]} for group in groups], **adamw)
        self._groups = optimizer.state_dict()["param_groups"]
        module: nn.Module = self.trained.train()
        if self.trained is not drafter:
            module = Root(self.trained)
            if accelerator.distributed_type == DistributedType.DEEPSPEED:
                from deepspeed.utils import set_z3_leaf_modules

                set_z3_leaf_modules(module, [Piece])
        self.model, self.optimizer = accelerator.prepare(module, optimizer)
        by_name = dict(self.trained.named_parameters())
        self.parameters = [by_name[name] for name in order]  # FSDP2 has put others in their place

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Forward and backward of one; gradients are exchanged after the last of a step."""
        if last:
            yield
            return
        state = self.accelerator.gradient_state
        state._set_sync_gradients(False)  # DeepSpeed would take a step in every backward
        try:
            with self.accelerator.no_sync(self.model):
                yield
        finally:
            state._set_sync_gradients(True)

    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to `max_norm`; their norm before, nan where it is not finite."""
        norm = self.accelerator.clip_grad_norm_(list(self.model.parameters()), max_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(norm) if float(norm) >= 0 else float("nan")  # DeepSpeed's mark is -1

    # ---- whole weights -----------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the whole drafter up to date. All processes call it together."""
        if self.trained is self.drafter:
            return
        shards = dict(self.trained.named_parameters())
        for name, whole in self.drafter.named_parameters():
            whole.copy_(self._whole(shards[name]))

    def _whole(self, shard: Tensor) -> Tensor:
        if self.accelerator.distributed_type == DistributedType.FSDP:
            return shard.full_tensor()
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(shard)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The whole drafter, up to date, on this process's device and in evaluation mode."""
        self.gather()
        shared = self.trained is not self.drafter
        if shared:
            self.drafter.to(self.accelerator.device)
        self.drafter.eval()
        yield
        self.drafter.train()
        if shared:
            self.drafter.to("cpu")

    # ---- the optimizer's state ---------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """AdamW's state dict for whole weights. All processes call it together; the main one's is
        whole."""
        kind = self.accelerator.distributed_type
        if kind == DistributedType.FSDP:
            state = self.optimizer.state_dict()["state"]
            number = {k: v["step"] for k, v in state.items()}
            find = lambda i, name: state[i][name].full_tensor()  # noqa: E731
        elif kind == DistributedType.DEEPSPEED:
            from deepspeed.utils import safe_get_full_optimizer_state

            taken = next(iter(self.model.optimizer.optimizer.state.values()))["step"]
            number = dict.fromkeys(range(len(self.parameters)), taken)
            find = lambda i, name: safe_get_full_optimizer_state(self.parameters[i], name)  # noqa: E731
        else:
            return self.optimizer.state_dict()
        main = self.accelerator.is_main_process
        whole: dict[int, dict[str, Tensor]] = {}
        for i, step in number.items():
            whole[i] = {"step": step.clone()}  # each counts its own
            for name in _MOMENTS:
                moment = find(i, name)  # of all processes together
                if main:
                    whole[i][name] = moment.cpu()
        return {"state": whole, "param_groups": self._groups}

    def load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Continue from what `optimizer_state` gave, under this or another launcher."""
        kind = self.accelerator.distributed_type
        if kind == DistributedType.DEEPSPEED:
            self._load_into_deepspeed(saved["state"])
            return
        if kind == DistributedType.FSDP:
            state = {i: dict(of_weight) for i, of_weight in saved["state"].items()}
            for i, of_weight in state.items():
                shard = self.parameters[i]
                for name in _MOMENTS:
                    whole = of_weight[name].to(self.accelerator.device)
                    of_weight[name] = distribute_tensor(whole, shard.device_mesh, shard.placements)
            saved = {"state": state, "param_groups": saved["param_groups"]}
        self.optimizer.load_state_dict(saved)

    @torch.no_grad()
    def _load_into_deepspeed(self, state: dict[int, dict[str, Tensor]]) -> None:
        from deepspeed.utils import (
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        zero = self.model.optimizer
        third = shares_weights(self.accelerator)
        flats = zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups
        step = state[0]["step"]
        for flat in flats:  # as AdamW's first step would
            zero.optimizer.state[flat] = {"step": step.to(flat.device, copy=True)} | {
                name: torch.zeros_like(flat) for name in _MOMENTS
            }
        if not third:
            zero._lazy_init_hp_params_optimizer_state()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        for i, weight in enumerate(self.parameters):
            for name in _MOMENTS:
                whole = state[i][name].to(self.accelerator.device)
                if third:  # shards are of one size, the last one padded
                    size = weight.ds_tensor.numel()
                    padded = functional.pad(whole.flatten(), (0, size * world - whole.numel()))
                    part = padded[rank * size : (rank + 1) * size]
                    safe_set_local_optimizer_state(weight, part, name)
                else:
                    safe_set_full_optimizer_state(weight, whole, name)
