// The workflow's graph as traced, with measured rates and the bottleneck; and what the plan chose and why.

import { duration, empty, h, number, replace, svg } from "./dom";
import type { Context, Mounted } from "./main";
import { laneName } from "./timeline";
import type { FlowEdge, FlowNode, FlowPage, TimelineView } from "./types";

const [BOX_W, BOX_H, GAP_X, GAP_Y] = [170, 74, 110, 34];

export function flowPage(root: HTMLElement, context: Context): Mounted {
  const load = async () => {
    try {
      const page = await context.source.flow(context.run.key);
      const lanes = page.flow?.nodes ? null : await context.source.timeline(context.run.key, { from: 0, to: 1e12, columns: 400, lane: 0, lanes: 60 });
      replace(root, h("h2", {}, "Flow"), ...graph(page.flow, lanes), h("h2", {}, "Plan"), ...plan(page.plan));
    } catch (error) {
      replace(root, h("p", { class: "problem" }, (error as Error).message));
    }
  };
  void load();
  return { refresh: () => void load() };
}

function graph(flow: FlowPage["flow"], lanes: TimelineView | null): HTMLElement[] {
  if (flow?.problem) return [h("p", { class: "problem" }, flow.problem)];
  if (flow?.nodes?.length) return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Flow graph" }, draw(flow.nodes, flow.edges ?? [], flow.bottleneck ?? "")), table(flow.nodes, flow.edges ?? [], flow.bottleneck ?? "")];
  const rows = (lanes?.lanes ?? []).map((lane, i): [string, number] => [laneName(lane), lanes!.busy[i] ?? 0]).sort((a, b) => b[1] - a[1]);
  const found = rows.length ? h("div", { class: "bars" }, ...rows.map(([name, busy]) => bar(name, busy))) : null;
  return [empty("This run has recorded no flow graph (flow.json): it is written when a workflow's channels are traced."), ...(found ? [h("p", {}, "What the traces alone say: the busiest lanes over the whole run."), found] : [])];
}

function bar(name: string, busy: number): HTMLElement {
  const fill = h("i", {});
  fill.style.width = `${100 * busy}%`;
  return h("div", { class: "meter" }, h("span", {}, name), h("span", { class: "track" }, fill), h("span", { class: "num" }, `${(100 * busy).toFixed(0)} % busy`));
}

/** Columns by the longest way from a source; edges that close a circle do not count. */
export function layers(nodes: FlowNode[], edges: FlowEdge[]): Map<string, number> {
  const layer = new Map(nodes.map((node) => [node.id, 0]));
  const back = closing(nodes, edges);
  const forward = edges.filter((edge) => !back.has(edge) && layer.has(edge.from) && layer.has(edge.to));
  for (let round = 0; round < nodes.length; round++) for (const edge of forward) layer.set(edge.to, Math.max(layer.get(edge.to)!, layer.get(edge.from)! + 1));
  return layer;
}

/** The edges that lead back to where a walk from the first nodes came from. */
function closing(nodes: FlowNode[], edges: FlowEdge[]): Set<FlowEdge> {
  const [found, done, path] = [new Set<FlowEdge>(), new Set<string>(), new Set<string>()];
  const walk = (id: string) => {
    path.add(id);
    for (const edge of edges.filter((one) => one.from === id)) {
      if (path.has(edge.to)) found.add(edge);
      else if (!done.has(edge.to)) walk(edge.to);
    }
    path.delete(id);
    done.add(id);
  };
  const sources = nodes.filter((node) => !edges.some((edge) => edge.to === node.id));
  for (const node of [...sources, ...nodes]) if (!done.has(node.id)) walk(node.id);
  return found;
}

function draw(nodes: FlowNode[], edges: FlowEdge[], bottleneck: string): SVGElement {
  const layer = layers(nodes, edges);
  const rows = new Map<number, number>();
  const place = new Map<string, [number, number]>();
  for (const node of nodes) {
    const column = layer.get(node.id) ?? 0;
    const row = rows.get(column) ?? 0;
    rows.set(column, row + 1);
    place.set(node.id, [20 + column * (BOX_W + GAP_X), 30 + row * (BOX_H + GAP_Y)]);
  }
  const width = 40 + (Math.max(...layer.values()) + 1) * (BOX_W + GAP_X) - GAP_X;
  const isCyclic = closing(nodes, edges).size > 0;
  const height = 30 + Math.max(...rows.values()) * (BOX_H + GAP_Y) + (isCyclic ? 50 : 0);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "graph", role: "img", "aria-label": "flow graph; the table below says the same" });
  const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto-start-reverse" });
  arrow.append(svg("path", { d: "M0 0L8 4L0 8z", class: "tip-end" }));
  picture.append(arrow);
  for (const edge of edges) {
    const [a, b] = [place.get(edge.from), place.get(edge.to)];
    if (!a || !b) continue;
    const isBack = b[0] <= a[0];
    const [x1, y1, x2, y2] = isBack ? [a[0] + BOX_W / 2, a[1] + BOX_H, b[0] + BOX_W / 2, b[1] + BOX_H] : [a[0] + BOX_W, a[1] + BOX_H / 2, b[0], b[1] + BOX_H / 2];
    const path = isBack ? `M${x1} ${y1}C${x1} ${y1 + 50} ${x2} ${y2 + 50} ${x2} ${y2}` : `M${x1} ${y1}C${x1 + 50} ${y1} ${x2 - 50} ${y2} ${x2} ${y2}`;
    picture.append(svg("path", { d: path, class: "edge", "marker-end": "url(#arrow)" }));
    const label = [edge.channel, edge.items_per_s !== undefined ? `${number(edge.items_per_s)}/s` : "", edge.depth !== undefined ? `${number(edge.depth)} waiting` : ""].filter(Boolean);
    label.forEach((text, i) => picture.append(svg("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 + (isBack ? 52 : -7 - 13 * (label.length - 1)) + 13 * i, "text-anchor": "middle", class: "small" }, text)));
  }
  for (const node of nodes) {
    const [x, y] = place.get(node.id)!;
    picture.append(svg("rect", { x, y, width: BOX_W, height: BOX_H, rx: 8, class: node.id === bottleneck ? "box bottleneck" : "box" }));
    const lines = [node.label ?? node.id, node.devices ? `devices ${node.devices}` : "", [node.items_per_s !== undefined ? `${number(node.items_per_s)}/s` : "", node.busy !== undefined ? `${(100 * node.busy).toFixed(0)} % busy` : ""].filter(Boolean).join(", ")];
    lines.forEach((text, i) => picture.append(svg("text", { x: x + 10, y: y + 20 + 18 * i, class: i ? "small" : "strong" }, text)));
    if (node.id === bottleneck) picture.append(svg("text", { x: x + 10, y: y - 6, class: "warn" }, "bottleneck"));
  }
  return picture;
}

function table(nodes: FlowNode[], edges: FlowEdge[], bottleneck: string): HTMLElement {
  const cell = (value: number | undefined, unit = "") => h("td", { class: "num" }, value === undefined ? "–" : `${number(value)}${unit}`);
  const stages = nodes.map((node) => h("tr", {}, h("th", { scope: "row" }, node.label ?? node.id, node.id === bottleneck ? h("b", { class: "bad" }, " bottleneck") : null), h("td", {}, node.devices ?? "–"), cell(node.items_per_s, "/s"), cell(node.busy === undefined ? undefined : 100 * node.busy, " %")));
  const channels = edges.map((edge) => h("tr", {}, h("th", { scope: "row" }, edge.channel ?? ""), h("td", {}, `${edge.from} → ${edge.to}`), cell(edge.items_per_s, "/s"), cell(edge.depth, edge.capacity ? ` of ${edge.capacity}` : "")));
  const head = (...names: string[]) => h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Stages and channels" }, h("table", { class: "facts" }, head("stage", "devices", "rate", "busy"), h("tbody", {}, ...stages)), h("table", { class: "facts" }, head("channel", "from, to", "rate", "waiting"), h("tbody", {}, ...channels)));
}

function plan(found: FlowPage["plan"]): HTMLElement[] {
  if (!found) return [empty("No plan is recorded (plan.json): this run was placed by its configuration alone.")];
  if (found.problem) return [h("p", { class: "problem" }, found.problem)];
  const others = (found.alternatives ?? []).map((one) => h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.why ?? "")));
  return [
    h("p", {}, h("b", {}, found.chosen ?? "a plan"), found.predicted_step_s !== undefined ? `, predicted ${duration(found.predicted_step_s)} a step` : ""),
    h("ul", {}, ...(found.why ?? []).map((reason) => h("li", {}, reason))),
    ...(others.length ? [h("table", { class: "facts" }, h("thead", {}, h("tr", {}, h("th", {}, "weighed against"), h("th", {}, "why not"))), h("tbody", {}, ...others))] : []),
  ];
}
