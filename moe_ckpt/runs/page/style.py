"""How the page looks: light and dark, wide and narrow. Colors of text have a contrast of at least 4.5 to 1."""

STYLE = (
    """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--mark:#b3261e;
--c0:#0b5cad;--c1:#b35900;--c2:#1a7f37;--c3:#8250df;--c4:#a40e63;--c5:#0e7490;--c6:#6b5900;--c7:#444c56;
--ok:#1a7f37;--warn:#c77700;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--soft:#9ea7b3;--line:#30363d;--card:#161b22;
--mark:#ff8177;--c0:#6cb6ff;--c1:#f0a35e;--c2:#57ab5a;--c3:#c297ff;--c4:#f778ba;--c5:#39c5cf;--c6:#daaa3f;--c7:#adbac7;
--ok:#46954a;--warn:#c69026;--bad:#e5534b}}
*{box-sizing:border-box}body{margin:0 auto;max-width:72rem;padding:1rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2.5rem;border-top:1px solid
var(--line);padding-top:1rem}h3{font-size:1.05rem}small,.soft{color:var(--soft);font-size:.85rem}a{color:var(--c0)}
nav ul,.legend{list-style:none;padding:0;margin:.3rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.say{padding:0;list-style:none}.say li{background:var(--card);border-left:.35rem solid var(--c7);padding:.5rem .8rem;
margin:.4rem 0}.say li.ok{border-color:var(--ok)}.say li.warn{border-color:var(--warn)}.say li.bad{border-color:
var(--bad)}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.2rem,1fr));gap:.6rem;margin:1rem 0}
.figures div{background:var(--card);padding:.6rem .8rem;border-radius:.4rem}dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.3rem;font-weight:600}dd small{display:block;font-weight:400}
figure{margin:1.5rem 0}figcaption{font-weight:600}.plot{display:grid;grid-template-columns:3.5rem 1fr}
.plot svg{width:100%;height:13rem;overflow:visible;display:block}.y{position:relative}.y span{position:absolute;right:
.4rem;transform:translateY(-50%);font-size:.75rem;color:var(--soft)}.x{display:flex;justify-content:space-between;
margin-left:3.5rem;font-size:.75rem;color:var(--soft);padding-top:.3rem}.grid{stroke:var(--line);stroke-width:1}
path{fill:none;vector-effect:non-scaling-stroke}.line{stroke-width:1.8}.dots{stroke-width:7;stroke-linecap:round}
.mark{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:4 3}
.band{display:grid;grid-template-columns:5.5rem 1fr;align-items:center;margin:.3rem 0;font-size:.85rem}
.band .mark{stroke:var(--fg)}.band svg{width:100%;height:1.4rem}.banded .x{margin-left:5.5rem}
.level2{fill:var(--ok);background:var(--ok)}.level1{fill:var(--warn);background:var(--warn)}
.level0{fill:var(--bad);background:var(--bad)}
.legend li{font-size:.85rem;display:flex;align-items:center;gap:.35rem}.legend i{width:1rem;height:.25rem;
display:inline-block}.legend i.dot{height:.6rem;width:.6rem;border-radius:50%}.legend i.mark{height:1rem;width:0;
border-left:2px dashed var(--mark)}.legend i[class^=p],.legend i[class^=level]{height:.8rem;width:.8rem}
.bar{display:flex;height:1.8rem;border-radius:.3rem;overflow:hidden;margin:.5rem 0;background:var(--card)}
.bar i{border-right:1px solid var(--bg)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;margin:.6rem 0}caption{text-align:left;
font-weight:600;padding:.3rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:left;
font-weight:400;vertical-align:top}thead th{color:var(--soft)}.n{text-align:right;font-variant-numeric:tabular-nums}
pre{background:var(--card);padding:.8rem;overflow-x:auto;font-size:.8rem}summary{cursor:pointer;padding:.2rem 0}
.heat td{min-width:2.6rem;text-align:right;font-size:.8rem}
"""
    + "".join(f".c{at}{{background:var(--c{at})}}.s{at}{{stroke:var(--c{at})}}" for at in range(8))
    + "".join(
        f".p{at}{{background:var(--{color})}}"
        for at, color in enumerate(("c2", "c0", "c1", "c3", "c5", "c4", "c6", "c7", "bad", "warn"))
    )
)
