"""Settings that every measurement of acceptance shares: what is measured, and under which laws."""

from dataclasses import dataclass, field

from headstart.data.conversations import reading
from headstart.eval.decoding.typical import Typical
from headstart.models.proposal import trees
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling, check_seed
from headstart.script import named


@dataclass
class RunSettings:
    """One law of decoding to measure under."""

    data: str = "data/smollm2/eval.jsonl"
    """Conversations whose answers the verifier wrote under this run's law."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    drafting: str = "greedy"
    """greedy: the drafter's best token; sampled: drawn from its law at the same settings."""
    acceptance: str = "exact"
    """exact: the text keeps the verifier's law; typical: Medusa's rule, lossy, no replay."""
    typical_epsilon: float = Typical.epsilon
    """Typical acceptance keeps a draft of more than this probability, in (0, 1)."""
    typical_delta: float = Typical.delta
    """And one of more than this share of exp(-entropy in nats), in (0, 1)."""

    def check(self) -> None:
        """Raise a ValueError for settings that do not go together."""
        Sampling(self.temperature, self.top_k, self.top_p)
        if self.drafting not in ("greedy", "sampled"):
            raise ValueError(f"drafting must be greedy or sampled, got {self.drafting!r}")
        if self.acceptance not in ("exact", "typical"):
            raise ValueError(f"acceptance must be exact or typical, got {self.acceptance!r}")
        Typical(self.typical_epsilon, self.typical_delta)
        for name in ("typical_epsilon", "typical_delta") if self.acceptance == "exact" else ():
            value = getattr(self, name)
            if value != getattr(RunSettings, name):
                raise ValueError(
                    f"{name} {value:g} is not used by acceptance exact; leave it out or set "
                    "acceptance to typical"
                )
        if self.acceptance == "typical" and self.temperature == 0:
            raise ValueError(
                "acceptance typical equals exact at temperature 0, where only the argmax is kept; "
                "set acceptance to exact or a temperature above 0"
            )

    @property
    def law(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def drafts(self) -> Drafting:
        return Drafting(self.drafting == "sampled", self.law)

    @property
    def typical(self) -> Typical | None:
        """Thresholds of typical acceptance; None for the exact rule."""
        if self.acceptance == "exact":
            return None
        return Typical(self.typical_epsilon, self.typical_delta)


@dataclass
class Measurement:
    """What is measured of a drafter, and how."""

    out: str
    """Folder for the report."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for; needed for any other drafter."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""
    runs: list[RunSettings] = field(
        default_factory=lambda: [
            RunSettings(),
            RunSettings("data/smollm2/eval-t1.jsonl", temperature=1.0, drafting="sampled"),
        ]
    )
    draft_length: int = 4
    """K, of replay and decoding with a chain."""
    tree: str | None = None
    """Measure a tree too: dynamic:depth=5,top_k=10,total=60, which is dynamic alone, or eagle2, the
    published dynamic:depth=8,top_k=10,total=59; static:4x2x2 or static:paths.json; or optimal:60,
    the best tree of so many nodes for this drafter, fitted to answers that are not decoded."""
    decode_prompts: int = 24
    """Prompts decoded for real, dealt evenly over the categories; 0: all."""
    speed_prompts: int = 12
    """Of these, timed with and without drafts, interleaved, one at a time; 0: no timing."""
    speed_max_new_tokens: int = 32
    """Longest answer while timing."""
    speed_draft_lengths: tuple[int, ...] = (1, 2, 4)
    max_new_tokens: int = 64
    """Longest decoded answer."""
    max_length: int = 1024
    """Longest conversation replayed, in tokens."""
    batch_size: int = 8
    """Prompts decoded together (not while timing)."""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        trees.chain(self.draft_length)
        for length in self.speed_draft_lengths:
            if length < 1:
                raise ValueError(f"speed_draft_lengths must be 1 or more each, got {length}")
        for name in ("max_new_tokens", "speed_max_new_tokens", "max_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name, nought in (("decode_prompts", "all"), ("speed_prompts", "no timing")):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 ({nought}) or more, got {getattr(self, name)}")
        check_seed(self.seed)
        if not self.runs:
            raise ValueError("runs must name at least one law to measure under")
        for number, one in enumerate(self.runs):
            with named(f"runs[{number}]"):
                one.check()
        if self.tree is not None and trees.optimal_budget(self.tree) is None:
            trees.parse(self.tree)


def check_data(settings: Measurement) -> None:
    """Raise a ValueError for data that is not there."""
    for number, one in enumerate(settings.runs):
        with named(f"runs[{number}].data"):
            reading.find(one.data)
