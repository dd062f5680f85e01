"""Style sheet of the report page, in light and dark colors."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.report.sparkline import NUM_COLOURS

_LIGHT = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
_DARK = ("#60a5fa", "#fb923c", "#34d399", "#c084fc", "#f87171", "#22d3ee", "#facc15", "#94a3b8")
assert len(_LIGHT) == len(_DARK) == NUM_COLOURS


def _colours(colours: Sequence[str]) -> str:
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))


STYLE = (
    f"""
:root{{color-scheme:light dark;--ink:#1f2933;--dim:#616e7c;--line:#e4e7eb;--page:#fff;--soft:#f5f7fa;
{_colours(_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--ink:#e6edf3;--dim:#9fb0c0;--line:#26313c;--page:#12181f;--soft:#1a222b;
{_colours(_DARK)}}}}}
"""
    """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif;color:var(--ink);background:var(--page);
max-width:1120px;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.5rem;margin:0 0 .75rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.25rem 0 .6rem}
h3{font-size:.95rem;margin:1.2rem 0 .4rem;overflow-wrap:anywhere}
.grid2{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1.25rem}
figure{margin:0;min-width:0}figcaption{font-size:.85rem;display:flex;justify-content:space-between;gap:1rem}
figcaption b{font-weight:600}figcaption>*{min-width:0;overflow-wrap:anywhere}figcaption span{color:var(--dim)}
.grid2 svg,.wide svg{display:block;width:100%;height:auto}
figure svg text{font-size:12px;fill:var(--dim)}figure svg text.in{fill:#fff;font-size:11px}
.grid{stroke:var(--line);fill:none}.axis{stroke:var(--dim);fill:none;opacity:.6}.bar{fill:var(--c0)}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.raw{fill:none;stroke-width:1;opacity:.28}
.val{fill:none;stroke-width:1.5;stroke-dasharray:2 4}.again{stroke-dasharray:7 3}
"""
    + "".join(
        f"path.c{i}{{stroke:var(--c{i})}}circle.c{i},rect.c{i},i.c{i}{{fill:var(--c{i});background:var(--c{i})}}"
        for i in range(NUM_COLOURS)
    )
    + """
.names{display:flex;flex-wrap:wrap;gap:.4rem 1.1rem;margin:0 0 1rem;padding:0;list-style:none}
.names i{display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.4rem;vertical-align:-1px}
.names li{overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.6rem;margin:0}
dl div{background:var(--soft);border-radius:6px;padding:.5rem .75rem}
dt{color:var(--dim);font-size:.8rem;line-height:1.25;overflow-wrap:anywhere}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid var(--line);padding:.35rem .8rem .35rem 0;
text-align:left;vertical-align:top}th{color:var(--dim);font-weight:500}
td{overflow-wrap:anywhere;min-width:4.5rem}
pre{background:var(--soft);border-radius:6px;padding:.75rem;overflow-x:auto;font-size:.82rem;margin:0;max-width:100%}
td img{display:block;max-width:100%;max-height:10rem;margin:0 0 .35rem;border-radius:4px}
td pre{background:none;padding:0;white-space:pre-wrap;font-size:.85rem;overflow-wrap:anywhere}
.picture{overflow-x:auto;background:#fff;border-radius:6px}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--dim);overflow-wrap:anywhere}
.failed{color:var(--c4)}small{color:var(--dim)}
"""
)
