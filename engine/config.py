"""What an engine is told at start: frozen, complete and loud.

Owns the meaning and bounds of every engine setting. Knows nothing of Serve, HTTP or where things are placed.
An unknown key or a bad value raises `ConfigError` naming the field. Measured values are never written back here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError

Method = Literal["none", "ngram", "draft_model", "eagle"]
DRAFT_METHODS: tuple[Method, ...] = ("draft_model", "eagle")
"""Those of a model in a folder, which says itself which of them it is."""
PolicyName = Literal["off", "fixed", "threshold", "goodput"]
MAX_K = 16
CPU_BLOCK, CUDA_PAGE = 16, 256


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Build from plain values.

        Raises:
            ConfigError: naming each bad field, what was given and what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """One line per bad field: its dotted name, what is wrong and what was given."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        lines.append(f"{name}: {item['msg']} (given: {item['input']!r})")
    return "; ".join(lines)


class SpeculativeConfig(Settings):
    """How tokens are drafted."""

    method: Method = "ngram"
    """Who drafts: nobody, prompt lookup, or the model that `draft` names, whose config.json says whether it is a model
    of its own or a head on the target's hidden states. Not needed where `draft` is given."""
    draft: str | None = None
    """Folder or Hugging Face id of the draft, or the name of one that ships with Paceline."""
    policy: PolicyName = "goodput"
    """Who chooses K: `off`, `fixed`, the operators' rule `threshold`, or `goodput`: most tokens per second."""
    k: Annotated[int, Field(ge=0, le=MAX_K)] = 5
    """Draft tokens per request and step, and the upper bound under every policy."""
    threshold_max_batch: Annotated[int, Field(ge=1)] = 16
    """Policy `threshold`: no drafting at this many decoding requests or more."""
    lookup: bool = True
    """With `draft_model` or `eagle`: draft by prompt lookup where the last tokens have occurred before in the request,
    and by the model elsewhere."""
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix, in tokens, that prompt lookup matches."""
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest suffix, in tokens, that prompt lookup matches."""
    memory_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.10
    """Cap on draft weights + KV, as a fraction of device memory."""
    deadline_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """A draft that has not answered by then counts as hung."""
    wrong_drafts: bool = False
    """For benchmarks: what is drafted is replaced by tokens that the target does not choose."""

    @model_validator(mode="before")
    @classmethod
    def _method_of_draft(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("draft") and "method" not in values:
            return values | {"method": "draft_model"}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.method in DRAFT_METHODS and not self.draft:
            raise ValueError(f"draft: method {self.method} needs a draft folder or id; set speculative.draft")
        if self.method not in DRAFT_METHODS and self.draft:
            raise ValueError(f"draft: given, but method is {self.method!r}; leave speculative.method out")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min: {self.ngram_min} is above ngram_max {self.ngram_max}")
        return self


class EngineConfig(Settings):
    """One engine: a target, how it is cut and cached, and how it speculates."""

    model: str
    """Folder or Hugging Face id of the target, or `smollm2` for the embedded default."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of weights and KV cache; `auto` is bfloat16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where there is one."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Target shards; each takes a whole number of KV groups, unevenly where they do not divide."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest prompt + output, tokens; default is the model's own limit."""
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens per KV block; default 16 on cpu, and 256 on cuda, whose paged attention takes multiples of that."""
    kv_cache_tokens: Annotated[int, Field(ge=16)] | None = None
    """Capacity of the target's KV pool in tokens; default: from the device's memory."""
    max_num_requests: Annotated[int, Field(ge=1, le=1024)] = 64
    """Requests that run at once."""
    max_num_waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that may queue beyond those; more are refused with QueueFull."""
    max_step_tokens: Annotated[int, Field(ge=16)] = 512
    """Rows of one forward: decodes first, then prefill chunks in what is left."""
    prefix_cache: bool = True
    """Reuse KV blocks of equal prompt prefixes."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads per shard; default: cores / shards."""
    kernel: Literal["auto", "native", "torch", "triton"] = "auto"
    """Who computes a forward on cpu in bfloat16: the native library (Linux on x86_64 with AVX512-BF16, a C++ compiler,
    one shard), or PyTorch's operators; `auto` takes the first where it serves. On cuda: PyTorch's operators, or with
    `triton` the fused kernels of Paceline."""
    speculative: SpeculativeConfig = SpeculativeConfig()

    @property
    def kv_block_size(self) -> int:
        """`block_size`, or the default of the device."""
        return self.block_size or (CUDA_PAGE if self.device == "cuda" else CPU_BLOCK)

    @property
    def forward_kernel(self) -> Literal["auto", "native", "torch", "triton"]:
        """`kernel`, but `torch` where the block size leaves no other choice."""
        return self.kernel if self.kv_block_size % CPU_BLOCK == 0 else "torch"

    @model_validator(mode="after")
    def _page_fits(self) -> Self:
        if self.device == "cuda" and self.kv_block_size % CUDA_PAGE:
            raise ValueError(f"block_size: {self.block_size} given; on cuda allowed are multiples of {CUDA_PAGE}")
        return self

    @model_validator(mode="after")
    def _kernel_has_its_device(self) -> Self:
        if self.kernel == "triton" and self.device == "cpu":
            raise ValueError("kernel: triton given, but device is cpu; allowed there are auto, native and torch")
        return self

    @model_validator(mode="after")
    def _tile_fits(self) -> Self:
        if self.kernel == "native" and self.kv_block_size % CPU_BLOCK:
            raise ValueError(f"block_size: {self.block_size} given; kernel native takes multiples of {CPU_BLOCK}")
        return self
