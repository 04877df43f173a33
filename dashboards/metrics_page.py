"""The declarations of the metrics as text: a table in the terminal, and the page in docs.

Owns the text around the declarations, not their content.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.metrics.definitions import METRICS
from engine.metrics.labels import COMMON_LABELS
from engine.metrics.types import Group, Metric

_TITLES: dict[Group, str] = {"speculation": "Speculation", "serving": "Serving", "fleet": "Fleet"}
_INTRO = """# Metrics

Made from `engine/metrics/definitions.py` by `paceline metrics --markdown`; a test keeps it current.

Each replica listens on a port of its own (settings `metrics_host`, `metrics_port`; by default a free port on loopback).
The server lists the living replicas of all nodes under `/metrics/targets`, for Prometheus' HTTP service discovery:

```yaml
scrape_configs:
  - job_name: paceline
    honor_labels: true
    http_sd_configs:
      - url: http://127.0.0.1:8000/metrics/targets
```

A replica that dies leaves the list within 15 seconds, one of a lost node as soon as Ray notices. With API keys the list
needs one: `authorization: {{credentials_file: FILE}}`. The Prometheus operator finds pods by itself and needs no list.
Each replica also writes a target file for `file_sd_configs` into `metrics_dir` (default `$PACELINE_METRICS_DIR`, else
`metrics-targets` in the cache folder). The file goes when the replica stops, or when its node is lost.

Every series carries the labels {common}. Units are seconds, tokens, blocks, bytes. There are no ready-made
ratios: divide rates, after adding them up over replicas, as the queries below do.
"""


def metrics_lines(metrics: Sequence[Metric] = METRICS) -> list[str]:
    """One line per metric for a terminal: name, kind, labels, help."""
    width = max(len(metric.name) for metric in metrics)
    return [
        f"{metric.name:{width}}  {metric.kind:9}  {','.join(metric.labels) or '-':9}  {metric.help}"
        for metric in metrics
    ]


def metrics_markdown(metrics: Sequence[Metric] = METRICS) -> str:
    """The page `docs/metrics.md`."""
    parts = [_INTRO.format(common=", ".join(f"`{name}`" for name in COMMON_LABELS))]
    for group, title in _TITLES.items():
        parts.append(f"\n## {title}\n")
        parts += [_entry(metric) for metric in metrics if metric.group == group and metric.alias_of is None]
    parts.append("\n## Buckets\n\nUpper bounds of the histograms' buckets; a last one has everything above.\n")
    parts += [_bounds(metrics, buckets) for buckets in dict.fromkeys(metric.buckets for metric in metrics) if buckets]
    parts.append("\n## Aliases\n\nThe same numbers under another server's names, so that boards made for it work.\n")
    parts += [f"- `{metric.name}` is `{metric.alias_of}`\n" for metric in metrics if metric.alias_of is not None]
    return "".join(parts)


def _entry(metric: Metric) -> str:
    facts: list[str] = [metric.kind, *([metric.unit] if metric.unit else [])]
    if metric.labels:
        values = f" ({', '.join(metric.values)})" if metric.values else ""
        facts.append(f"by `{metric.labels[0]}`{values}")
    return f"- **`{metric.name}`**, {', '.join(facts)}. {metric.help}\n  `{metric.query(window='5m')}`\n"


def _bounds(metrics: Sequence[Metric], buckets: tuple[float, ...]) -> str:
    names = ", ".join(f"`{metric.name}`" for metric in metrics if metric.buckets == buckets)
    return f"- {names}: {', '.join(f'{bound:g}' for bound in buckets)}\n"
