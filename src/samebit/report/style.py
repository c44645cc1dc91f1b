"""The page's style sheet and its small script (a read-out under the pointer)."""

CSS = """
:root{--bg:#f5f6f8;--card:#fff;--ink:#1c2430;--muted:#667085;--line:#e2e6ec;--grid:#edf0f4;
--good:#0b7a53;--good-bg:#e4f5ee;--bad:#b42318;--bad-bg:#fdecea;--accent:#2f6fdf}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1a2029;--ink:#e6e9ee;--muted:#98a2b3;
--line:#2c3440;--grid:#252c37;--good:#4fd3a0;--good-bg:#12332a;--bad:#ff8f85;--bad-bg:#3a1c1a;
--accent:#6d9df0}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1220px;margin:0 auto;padding:28px 24px 60px}
header h1{font-size:25px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
header p{margin:0 0 20px;color:var(--muted)}
h2{font-size:18px;margin:34px 0 12px}
h3{font-size:15px;margin:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;
min-width:0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:16px}
.about{color:var(--muted);font-size:13px;margin:2px 0 8px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin:0 0 4px;padding:0;
list-style:none}
.legend svg{width:24px;height:10px;margin-right:6px;vertical-align:0}
.chart{width:100%;height:auto;display:block;overflow:visible}
.grid-line,.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .tick{font-size:11px;fill:var(--muted);font-variant-numeric:tabular-nums}
.chart .cursor{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 3;pointer-events:none}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-weight:600;font-size:12.5px;color:var(--muted);white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
td.number,th.number{text-align:right}
.scroll{overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:16px;margin-bottom:16px}
.tile b{display:block;font-size:26px;line-height:1.2;letter-spacing:-.01em;font-weight:650}
.tile span{color:var(--muted);font-size:13px}
.tile.exact b,.exact b{color:var(--good)}.tile.inexact b,.inexact b{color:var(--bad)}
.verdicts{display:flex;flex-direction:column;gap:10px;justify-content:center;min-height:200px}
.verdicts.line{min-height:0;margin:6px 0 8px}
.verdicts p{margin:0;padding:16px 18px;border-radius:8px;display:flex;gap:4px 16px;flex-wrap:wrap;
align-items:baseline}
.verdicts.line p{padding:7px 12px}
.verdicts b{font-size:28px;line-height:1.2}.verdicts.line b{font-size:15px}
.exact{background:var(--good-bg)}.inexact{background:var(--bad-bg)}
.tile.exact,.tile.inexact{background:var(--card)}
.dot{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:8px}
.f{width:100%;max-width:1040px;height:auto;display:block;margin:14px auto 0}
details{margin-top:10px}summary{cursor:pointer;color:var(--accent);font-size:14px}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;
font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.samples td pre{max-height:180px;overflow:auto}
.samples td{min-width:60px}.samples td:first-child{width:38%}
.reward{font-weight:650}.reward.full{color:var(--good)}.reward.none{color:var(--muted);font-weight:400}
#tip{position:fixed;display:none;pointer-events:none;background:var(--card);color:var(--ink);
border:1px solid var(--line);border-radius:8px;padding:7px 11px;font-size:12.5px;z-index:9;
box-shadow:0 4px 16px rgb(0 0 0/.16);font-variant-numeric:tabular-nums;max-width:340px}
#tip i{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:7px}
footer{margin-top:36px;color:var(--muted);font-size:13px}
@media(max-width:560px){.grid{grid-template-columns:1fr}main{padding:18px 12px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""

SCRIPT = """
const tip=document.getElementById('tip');
for(const svg of document.querySelectorAll('svg[data-chart]')){
 const d=JSON.parse(svg.dataset.chart),cursor=svg.querySelector('.cursor');
 const left=54,right=14,width=560,span=(d.x[1]-d.x[0])||1;
 svg.addEventListener('mousemove',e=>{
  const box=svg.getBoundingClientRect(),u=(e.clientX-box.left)/box.width*width;
  const want=d.x[0]+(u-left)/(width-left-right)*span;
  let best=null;
  for(const s of d.s)for(const p of s.p)
   if(best===null||Math.abs(p[0]-want)<Math.abs(best-want))best=p[0];
  if(best===null)return;
  const at=left+(best-d.x[0])/span*(width-left-right);
  cursor.setAttribute('x1',at);cursor.setAttribute('x2',at);cursor.setAttribute('visibility','visible');
  tip.replaceChildren();
  const head=document.createElement('div');
  head.textContent='step '+(d.t?d.t[best]:best);tip.append(head);
  for(const s of d.s){
   const p=s.p.find(p=>p[0]===best);if(!p)continue;
   const row=document.createElement('div'),dot=document.createElement('i');
   dot.style.background=s.c;
   row.append(dot,s.n+': '+(p[1]===0?'0':Number(p[1].toPrecision(4))));tip.append(row);
  }
  tip.style.display='block';
  const x=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8);
  tip.style.left=x+'px';tip.style.top=(e.clientY+14)+'px';
 });
 svg.addEventListener('mouseleave',()=>{tip.style.display='none';
  cursor.setAttribute('visibility','hidden')});
}
"""
