"""A causal language model with the verifier's tokenizer as drafter: the vanilla draft model.

At slot t, step s it reads x_0 … x_{t+1+s}, so its law for x_{t+2+s} is its own at position t+1+s:
one pass over a text gives every step, each a shift of the same hidden states. It needs nothing of
the verifier's states.

Legend: B rows, T slots, n new tokens, M nodes stepped, H' the draft model's hidden size, V and V'
verifier's and draft model's vocabulary.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headstart.models import saved
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape, walk
from headstart.models.saved import check_finite, check_shape, made_for
from headstart.models.verifier import rotary
from headstart.models.verifier.cache import HOLE, RaggedCache
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import States, Verifier
from headstart.models.verifier.weights import follow_umask
from headstart.script import named

_OTHER_INIT = "Or layers:0-5, of the verifier itself."
_OTHER_DRAFTERS = (
    "(A drafter may also be the folder of a checkpoint, prompt-lookup, lookahead, or layers:0-5.)"
)


@dataclass
class DraftLMConfig:
    """The model to start from."""

    init: str = "layers:0-5"
    """layers:0,1,28,29: the verifier itself with only these layers, copied; or any causal language
    model with the verifier's tokenizer, as a folder or a Hub name."""

    def check(self, verifier: Outline) -> None:
        """Raise a ValueError for layers or a model that are not there."""
        if self.init.startswith("layers:"):
            with named(f"drafter.init {self.init!r}"):
                check_layers(parse_layers(self.init), verifier)
            return
        kind = drafter_in(self.init)
        if kind not in (None, "draft_lm"):
            raise ValueError(
                f"drafter.init {self.init!r} is a drafter of type {kind}, not a language model; "
                f"to train it on, use train/{kind}.py with --init_from. {_OTHER_INIT}"
            )
        with model_of_drafter("drafter.init", _OTHER_INIT):
            Outline.read(self.init)


def drafter_in(name: str) -> str | None:
    """What kind of drafter lies in this folder, headstart's or another program's; None: none."""
    try:
        entry = json.loads((Path(name) / "config.json").read_text())["headstart"]
        return str(entry["type"])
    except (OSError, KeyError, TypeError, ValueError):
        return saved.kind_in(name)


class State:
    """Decoding state. The cache may end in nodes of the last proposal, not known to be right."""

    def __init__(self, first_tokens: Tensor):
        self.first: Tensor | None = first_tokens[:, None]  # [B, 1] x_0, until it has been read
        self.cache = RaggedCache(len(first_tokens), first_tokens.device)
        self.length = torch.zeros_like(first_tokens)  # [B] tokens read, these nodes not among them
        self.output: Tensor | None = None  # [B, H'] after the pending token
        self.nodes: tuple[Tensor, Tensor] | None = None  # [B, M] tokens and parents of those nodes


class DraftLM(TrainableDrafter):
    """The drafter around a model, which is wrapped as a `Verifier` for its caches and logits."""

    feature_layers = ()
    serving = "draft_model"

    def __init__(self, lm: Verifier, verifier: Verifier, loss: LossConfig):
        super().__init__(verifier, loss)
        check_tokenizer(lm, verifier)
        self._lm = (lm,)
        self.model = lm.model
        self.config = lm.model.config
        self.context_length = lm.context_length
        # padded vocabularies may differ in size; real tokens are below both
        self.width = min(lm.vocab_size, verifier.vocab_size)
        shorter = self.width < verifier.vocab_size
        self.draft_ids = torch.arange(self.width, device=lm.device) if shorter else None

    @classmethod
    def create(cls, verifier: Verifier, config: DraftLMConfig, loss: LossConfig) -> "DraftLM":
        """A drafter to be trained, in float32, with weights of its own.

        Raises:
            ValueError: no such model, another tokenizer, layers that the verifier does not have.
        """
        if config.init.startswith("layers:"):
            lm = parse_cut(config.init, verifier, "drafter.init")
            model = copy.deepcopy(lm.model).float()  # the verifier's own weights stay as they are
            lm = Verifier(model, lm.tokenizer, lm.name, lm.length)
        else:
            with model_of_drafter("drafter.init", _OTHER_INIT):
                lm = Verifier.load(config.init, "float32", verifier.device)
            lm = with_positions_for(verifier, lm)
        with named(f"drafter.init {config.init!r}"):
            drafter = cls(lm, verifier, loss)
        drafter.model.requires_grad_(True)
        return drafter

    @property
    def lm(self) -> Verifier:
        return self._lm[0]

    # ---- training and replay -----------------------------------------------------------------

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        ids, positions = batch["input_ids"], batch["position_ids"]
        ids = ids.clamp(max=self.lm.vocab_size - 1)
        hidden = self.lm.states(ids, (), positions, batch["document_ids"]).last_hidden
        for _ in range(num_steps):
            hidden = torch.cat([hidden[:, 1:], hidden[:, -1:]], dim=1)
            yield hidden

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm.logits(hidden)[..., : self.width]

    # ---- decoding ----------------------------------------------------------------------------

    def start(self, first_tokens: Tensor) -> State:
        return State(first_tokens)

    def advance(self, state: State, tokens: Tensor, lengths: Tensor, states: States) -> None:
        if state.first is not None:
            tokens, lengths = torch.cat([state.first, tokens], 1), lengths + 1
            state.first = None
        if not bool(lengths.any()):
            return
        tokens = tokens.clamp(max=self.lm.vocab_size - 1)  # ids of the verifier's padding
        known = self._keep_verified(state, tokens, lengths)
        order = torch.arange(int((lengths - known).max()), device=tokens.device)
        index = known[:, None] + order
        new = index < lengths[:, None]
        positions = (state.length[:, None] + index).masked_fill(~new, HOLE)
        tokens = tokens.gather(1, index.clamp(max=tokens.shape[1] - 1))
        hidden = self.lm.states(tokens, (), positions, cache=state.cache).last_hidden
        last = (lengths - known - 1).clamp(min=0)
        output = hidden[torch.arange(len(tokens), device=tokens.device), last]
        if state.output is not None:
            output = torch.where((lengths > 0)[:, None], output, state.output)
        state.output = output
        state.length = state.length + lengths

    def _keep_verified(self, state: State, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Keep the proposal's nodes that came true, drop the others: how many, `[B]`.

        Unlike a drafter that reads the verifier's states, this one has read exactly these tokens.
        The last token always stays to be read: what follows it is wanted.
        """
        if state.nodes is None:
            return torch.zeros_like(lengths)
        node_tokens, parents = state.nodes
        state.nodes = None
        path, count = walk(
            node_tokens,
            parents,
            torch.ones_like(node_tokens, dtype=torch.bool),
            lambda i, _: torch.where(i < lengths - 1, tokens[:, i], -1),
            tokens.shape[1] - 1,
        )
        state.cache.keep_path(node_tokens.shape[1], path, count, int(count.max()))
        return count

    def propose(
        self, state: State, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        self._forget_nodes(state)

        def step(nodes: Nodes) -> Tensor:
            positions = (state.length + nodes.depth - 1)[:, None].expand_as(nodes.tokens)
            # where a text ends, deeper nodes are dropped later, but must not crash here
            positions = positions.clamp(max=self.lm.context_length - 1)
            states = self.lm.states(nodes.tokens, (), positions, cache=state.cache, mask=nodes.seen)
            held = (nodes.tokens, nodes.parents)
            if state.nodes is not None:
                held = tuple(torch.cat(pair, 1) for pair in zip(state.nodes, held, strict=True))
            state.nodes = held
            return self.logits(states.last_hidden, nodes.depth)

        return grow(self.logits(state.output, 0), step, shape, drafting, random, self.draft_ids)

    @staticmethod
    def _forget_nodes(state: State) -> None:
        if state.nodes is not None:
            state.cache.truncate(state.cache.positions.shape[1] - state.nodes[0].shape[1])
            state.nodes = None

    def select_rows(self, state: State, rows: Tensor) -> None:
        state.cache.select_rows(rows, squeeze=state.nodes is None)  # nodes lie at the end
        state.length = state.length[rows]
        if state.first is not None:
            state.first = state.first[rows]
        if state.output is not None:
            state.output = state.output[rows]
        if state.nodes is not None:
            state.nodes = tuple(held[rows] for held in state.nodes)

    # ---- checkpoint --------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """An ordinary folder of the model, as transformers writes it, with its tokenizer."""
        self.model.save_pretrained(folder)
        follow_umask(*folder.glob("*.safetensors"))
        self.lm.tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["headstart"] = made_for(self.verifier, "draft_lm") | {
            "target_hidden_size": self.verifier.hidden_size,
            "target_vocab_size": self.verifier.vocab_size,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(
        cls,
        folder: Path,
        config: dict,
        verifier: Verifier,
        loss: LossConfig,
        dtype: str = "float32",
    ) -> "DraftLM":
        """Read a saved drafter.

        Raises:
            ValueError: damaged weights, or a verifier of another shape.
        """
        check_shape(folder, config, verifier)
        drafter = cls(load_lm(str(folder), dtype, verifier), verifier, loss)
        check_finite(folder, dict(drafter.model.named_parameters()))
        drafter.model.requires_grad_(True)
        return drafter


def check_tokenizer(lm: Verifier, verifier: Verifier) -> None:
    """Both models must mean the same by an id.

    Raises:
        ValueError: they do not.
    """
    ours, theirs = lm.tokenizer.get_vocab(), verifier.tokenizer.get_vocab()
    differing = [token for token, number in theirs.items() if ours.get(token) != number]
    if not differing and len(ours) == len(theirs):
        return
    example = ""
    if differing:
        token = min(differing, key=theirs.get)
        example = (
            f", first {token!r}: {theirs[token]} to the verifier, "
            f"{ours.get(token, 'no token')} to the drafter"
        )
    raise ValueError(
        f"drafter {lm.name!r} has another tokenizer than the verifier {verifier.name!r}: "
        f"{len(ours)} tokens against {len(theirs)}, {len(differing)} of the verifier's differ"
        f"{example}; pass a model of the same family"
    )


def cut(verifier: Verifier, layers: tuple[int, ...]) -> Verifier:
    """The verifier with only some of its decoder layers, numbered from 0; weights are shared.

    Raises:
        ValueError: a layer that it does not have, or none.
    """
    check_layers(layers, verifier)
    config = copy.deepcopy(verifier.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    for field, value in text.to_dict().items():  # what each layer is, such as layer_types
        if "layer" in field and isinstance(value, list) and len(value) == verifier.num_layers:
            setattr(text, field, [value[layer] for layer in layers])
    model = type(verifier.model)(config).to(verifier.dtype)
    prefix = next(n for n, m in verifier.model.named_modules() if m is verifier.layers) + "."
    weights = {}
    for name, tensor in verifier.model.state_dict().items():
        if not name.startswith(prefix):
            weights[name] = tensor
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        for place, layer in enumerate(layers):
            if layer == int(number):
                weights[f"{prefix}{place}.{rest}"] = tensor
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} has layers of which some are made otherwise by their place, "
            f"so {','.join(map(str, layers))} alone are no such model; pass other layers, or a "
            "small model of the same family"
        ) from error
    model.tie_weights()
    model.generation_config = verifier.model.generation_config
    name = f"{verifier.name} cut to layers {','.join(map(str, layers))}"
    return Verifier(model.to(verifier.device), verifier.tokenizer, name, verifier.length)


def check_layers(layers: tuple[int, ...], verifier: Verifier | Outline) -> None:
    """Raise a ValueError for a layer that the verifier does not have, or none."""
    wrong = [layer for layer in layers if not 0 <= layer < verifier.num_layers]
    if wrong or not layers:
        raise ValueError(
            f"layers must be ids in 0 … {verifier.num_layers - 1} of {verifier.name!r}, "
            f"got {wrong[0] if wrong else 'none'}"
        )


def parse_cut(text: str, verifier: Verifier, field: str) -> Verifier:
    """The verifier cut to layers:0-3,28,29, the value of `field`."""
    with named(f"{field} {text!r}"):
        return cut(verifier, parse_layers(text))


def parse_layers(text: str) -> tuple[int, ...]:
    """layers:0-3,28,29

    Raises:
        ValueError: something else.
    """
    found: list[int] = []
    for part in text.partition(":")[2].split(","):
        span = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if not span or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(
                f"{part!r} is no layer, nor a range of them; write layers:0-5 or layers:0,1,29"
            )
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return tuple(found)


def load_lm(name: str, dtype: str, verifier: Verifier) -> Verifier:
    """A causal language model to draft with.

    Raises:
        ValueError: it cannot be loaded.
    """
    with model_of_drafter("drafter", _OTHER_DRAFTERS):
        lm = Verifier.load(name, dtype, verifier.device)
    return with_positions_for(verifier, lm)


def with_positions_for(verifier: Verifier, lm: Verifier) -> Verifier:
    """A draft model whose rotary factors hang on the text's length has those for the verifier's
    longest one: an engine serves both with one --max-model-len."""
    if rotary.border(lm.config) is None:
        return lm
    length = min(verifier.context_length, rotary.whole_length(lm.config))
    return Verifier(lm.model, lm.tokenizer, lm.name, length)


@contextmanager
def model_of_drafter(field: str, others: str) -> Iterator[None]:
    """Errors about a model name `field`, not the verifier, and end with what else it may be."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{str(error).replace('verifier', field, 1)} {others}") from error
