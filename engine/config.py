"""The settings of one engine: frozen and checked at start.

Owns the meaning and the bounds of every engine setting. Knows nothing of Serve, HTTP or placement. An unknown key or a
bad value raises `ConfigError`, which names the field. Measured values are never written back into settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError
from engine.tree import MAX_WIDTH

Method = Literal["none", "ngram", "draft_model", "eagle", "medusa"]
DRAFT_METHODS: tuple[Method, ...] = ("draft_model", "eagle", "medusa")
"""Methods that draft with a model. The model's config.json says which of them it is."""
PolicyName = Literal["off", "fixed", "threshold", "goodput"]
MAX_K = 16
"""Largest K that any setting, plan or request can ask for."""
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}$"
"""Names that an adapter may have."""
CPU_BLOCK, CUDA_PAGE = 16, 256
"""Default block sizes in tokens: of the native kernel on cpu, of paged attention on cuda. Both need multiples."""


class Settings(BaseModel):
    """Base of all settings: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    """A message that gives, for each bad field, its dotted name, what is wrong and the value that was given."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        lines.append(f"{name}: {item['msg']} (given: {item['input']!r})")
    return "; ".join(lines)


class AdaptationConfig(Settings):
    """Online adaptation: the draft learns from the requests that it drafts for, while no request runs."""

    enabled: bool = False
    """Train the draft on live traffic. Needs an `eagle` draft of Paceline's own layout that is a chain, and cpu. The
    distribution of the output never depends on it, but the weights keep traces of the requests, and so does speed."""
    keys: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], ...] = ()
    """Names of the API keys whose owners consent: one draft learns from the requests of all of them, and of no others.
    On a server without keys it learns from every request. A request opts out with `speculative: {"learn": false}`."""
    buffer_mib: Annotated[int, Field(ge=1, le=16384)] = 128
    """Memory of the requests that are kept to learn from, in MiB; the oldest are dropped."""
    cpu_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Upper bound of the trainer's time, as a share of one CPU. It never runs while a request does."""


class SpeculativeConfig(Settings):
    """How tokens are drafted."""

    method: Method = "ngram"
    """Drafting method: `none`, `ngram` (prompt lookup), `draft_model` (a separate model), `eagle` (a decoder on the
    target's hidden states) or `medusa` (heads on the target's last hidden state). With `draft` set it may be left out:
    the draft's config.json names the method."""
    draft: str | None = None
    """Folder or Hugging Face id of the draft, or the name of a draft that ships with Paceline."""
    policy: PolicyName = "goodput"
    """How K is chosen: `off` (no drafting), `fixed` (always `k`), `threshold` (`k` below a batch size) or `goodput`
    (the K with the most tokens per second)."""
    k: Annotated[int, Field(ge=0, le=MAX_K)] = 5
    """Draft tokens per request and step under `fixed` and `threshold`; the upper bound of K under every policy."""
    threshold_max_batch: Annotated[int, Field(ge=1)] = 16
    """Policy `threshold`: no drafting at this many decoding requests or more."""
    tree: Literal["off", "auto"] = "off"
    """Whether drafts may branch: `off` (every draft is a chain) or `auto` (the draft and prompt lookup are merged into
    one tree per request, and K is the number of its nodes). On cuda a draft model reads each level of a tree before it
    drafts the next one."""
    tree_width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = 3
    """With `tree`: most children of a node, and most nodes of a level that get children; 1 is the same as `off`."""
    lookup: bool = True
    """With a method that has a draft: draft by prompt lookup if the last tokens have occurred before in the request,
    and by the model otherwise."""
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix, in tokens, that prompt lookup matches."""
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest suffix, in tokens, that prompt lookup matches."""
    shared_lookup: Literal["off", "client", "all"] = "off"
    """Whose outputs prompt lookup searches beside the request itself: `off` (none), `client` (earlier ones of the same
    client, that is of the same API key) or `all` (earlier ones of everybody). The text of an answer never depends on
    it, but its speed does: with `all`, a client can tell from the speed whether another one got a text."""
    shared_lookup_mib: Annotated[int, Field(ge=1, le=4096)] = 16
    """Memory of the outputs that `shared_lookup` keeps, in MiB; the oldest are dropped. 16 bytes per token."""
    memory_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.10
    """Upper bound of the draft's weights and KV cache, as a fraction of device memory."""
    adaptation: AdaptationConfig = AdaptationConfig()
    """Whether the draft learns from live traffic. Off by default."""
    deadline_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Seconds after which a draft without a response counts as hung."""
    wrong_drafts: bool = False
    """For benchmarks: replace every draft token by a token that the target does not choose."""

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
        if self.adaptation.enabled and self.method in ("none", "ngram", "medusa"):
            raise ValueError(
                f"adaptation.enabled: true given, but method {self.method} has no eagle draft that can learn"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min: {self.ngram_min} is above ngram_max {self.ngram_max}")
        return self


class LoraConfig(Settings):
    """LoRA adapters of the target, each served as a model of its own name."""

    adapters: dict[Annotated[str, Field(pattern=ADAPTER_NAME)], str] = Field(default_factory=dict)
    """Adapters to serve from the start: the name that clients send as `model`, and the folder as `peft` writes it."""
    max_loras: Annotated[int, Field(ge=1, le=256)] = 8
    """Adapters that are held at once. Those that still serve their last requests count."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 64
    """Largest rank of an adapter in any layer."""

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if len(self.adapters) > self.max_loras:
            raise ValueError(f"adapters: {len(self.adapters)} given, max_loras allows {self.max_loras}")
        return self


class EngineConfig(Settings):
    """One engine: its target model, its KV cache, its limits and its speculation."""

    model: str
    """Folder, `.gguf` file or Hugging Face id of the target, or `smollm2` for the embedded default."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights, KV cache and computation; `auto` is bfloat16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the target; `auto` is cuda if there is a CUDA device, on a Ray cluster if a node has one for every
    shard, else cpu."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of target shards. Each shard takes whole KV groups; some take one more if they do not divide evenly. With
    more shards than KV heads, several shards have copies of one."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest prompt plus output, in tokens; default: the model's limit."""
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens per KV block; default: 16 on cpu, 256 on cuda, where paged attention needs multiples of 256."""
    kv_cache_tokens: Annotated[int, Field(ge=16)] | None = None
    """Capacity of the target's KV pool in tokens; default: from the device's memory."""
    max_num_requests: Annotated[int, Field(ge=1, le=1024)] = 64
    """Requests that run at once."""
    max_num_waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait beyond the running ones; further requests are refused with QueueFull."""
    max_step_tokens: Annotated[int, Field(ge=16)] = 512
    """Rows of one forward. Decodes take their rows first; prefill chunks take the rest."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Type of the target's KV cache: `auto` (that of the computation), `int8` (on cpu) or `fp8` (e4m3, on cuda); both
    take about half the memory of bfloat16 and are lossy: logits and outputs change. A draft's cache is never
    quantised."""
    prefix_cache: bool = True
    """Reuse KV blocks of equal prompt prefixes."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads per shard. Default: the CPUs of the CPU set, as far as the quota allows, divided by shards."""
    kernel: Literal["auto", "native", "torch", "triton", "invariant"] = "auto"
    """Kernels of a bfloat16 forward. On cpu: `native` (needs Linux on x86_64 with AVX512-BF16, a C++ compiler and one
    shard), `torch` (PyTorch's operators), or `auto` (`native` if its needs are met, else `torch`). On cuda: `torch`,
    `triton` for the fused kernels of Paceline, or `invariant` for those with products and attention whose rounding does
    not depend on the batch (slower; one shard), so that greedy output with drafts is that without; `auto` is
    `torch`."""
    packed: Literal["auto", "off"] = "auto"
    """Quantised weights on the `native` kernel: `auto` keeps them in memory as they are where the kernel has their
    type, `off` dequantises all of them at load. The outputs are the same."""
    cuda_graphs: Literal["off", "on"] = "off"
    """On cuda: record the forwards of decoding and verification as CUDA graphs at start, for batch sizes up to
    `max_num_requests`. `off` launches each kernel from the host."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    """How tokens are drafted."""
    lora: LoraConfig | None = None
    """LoRA adapters. `lora: {}` serves none at the start and lets operators load some. Default: none can be loaded."""

    @property
    def kv_block_size(self) -> int:
        """Tokens per KV block: `block_size`, or the device's default."""
        return self.block_size or (CUDA_PAGE if self.device == "cuda" else CPU_BLOCK)

    @property
    def forward_kernel(self) -> Literal["auto", "native", "torch", "triton", "invariant"]:
        """`kernel`, or `torch` if the block size is not a multiple that the native kernel needs."""
        return self.kernel if self.kv_block_size % CPU_BLOCK == 0 else "torch"

    @property
    def draft_kernel(self) -> Literal["auto", "native", "torch", "triton"]:
        """The kernel of a draft, whose rounding decides what it drafts but nothing that is emitted."""
        return "triton" if self.forward_kernel == "invariant" else self.forward_kernel

    @property
    def tree_width(self) -> int:
        """Width of draft trees; 1 where drafts are chains."""
        return self.speculative.tree_width if self.speculative.tree == "auto" else 1

    @model_validator(mode="after")
    def _adapters_are_computed(self) -> Self:
        if self.lora is not None and self.kernel in ("triton", "invariant"):
            raise ValueError(
                f"kernel: {self.kernel} does not compute adapters; with lora allowed are auto, native and torch"
            )
        if self.lora is not None and self.cuda_graphs == "on":
            raise ValueError("cuda_graphs: on given, but recorded forwards have no adapters; with lora allowed is off")
        return self

    @model_validator(mode="after")
    def _page_fits(self) -> Self:
        if self.device == "cuda" and self.kv_block_size % CUDA_PAGE:
            raise ValueError(f"block_size: {self.block_size} given; on cuda allowed are multiples of {CUDA_PAGE}")
        return self

    @model_validator(mode="after")
    def _kernel_has_its_device(self) -> Self:
        if self.kernel in ("triton", "invariant") and self.device == "cpu":
            raise ValueError(
                f"kernel: {self.kernel} given, but device is cpu; allowed there are auto, native and torch"
            )
        if self.kernel == "invariant" and self.tensor_parallel_size > 1:
            raise ValueError(
                "kernel: invariant given, but the sums over shards are those of NCCL; allowed is tensor_parallel_size 1"
            )
        return self

    @model_validator(mode="after")
    def _kv_cache_has_its_device(self) -> Self:
        if self.kv_cache_dtype == "int8" and self.device == "cuda":
            raise ValueError("kv_cache_dtype: int8 given, but device is cuda; allowed there are auto and fp8")
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ValueError("kv_cache_dtype: fp8 given, but device is cpu; allowed there are auto and int8")
        if self.kv_cache_dtype == "fp8" and self.dtype == "float32":
            raise ValueError("kv_cache_dtype: fp8 given, but dtype is float32; it needs bfloat16, allowed is auto")
        return self

    @model_validator(mode="after")
    def _graphs_have_their_device(self) -> Self:
        if self.cuda_graphs == "on" and self.device == "cpu":
            raise ValueError("cuda_graphs: on given, but device is cpu; allowed there is off")
        return self

    @model_validator(mode="after")
    def _adaptation_has_its_device(self) -> Self:
        if self.speculative.adaptation.enabled and self.device == "cuda":
            raise ValueError("speculative.adaptation.enabled: true given, but device is cuda; allowed there is false")
        return self

    @model_validator(mode="after")
    def _tile_fits(self) -> Self:
        if self.kernel == "native" and self.kv_block_size % CPU_BLOCK:
            raise ValueError(f"block_size: {self.block_size} given; kernel native takes multiples of {CPU_BLOCK}")
        return self
