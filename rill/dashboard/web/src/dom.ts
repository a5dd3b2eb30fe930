// Making elements and writing numbers. Text goes through textContent everywhere: nothing in a run is ever markup.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | EventListener | undefined>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = String(value);
    else if (name === "value" && "value" in element) (element as unknown as HTMLInputElement).value = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, ...children);
  return element;
}

export function put(parent: Node, ...children: Child[]): void {
  for (const child of children) if (child !== null && child !== undefined && child !== false) parent.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
}

export function replace(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  put(parent, ...children);
}

export function svg(tag: string, attributes: Record<string, string | number>, text?: string): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== undefined) element.textContent = text;
  return element;
}

export function select(label: string, options: [string, string][], value: string, onchange: (value: string) => void): HTMLLabelElement {
  const box = h("select", { onchange: () => onchange(box.value) }, ...options.map(([key, text]) => h("option", { value: key }, text)));
  box.value = value;
  return h("label", {}, label, " ", box);
}

export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  return String(Number(value.toPrecision(3)));
}

export function figure(name: string, value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (/accuracy|pass@|\/truncated|host\/(cpu|memory|disk)|gpu \d+\//.test(name)) return `${Number((100 * value).toFixed(1))} %`;
  if (/_bytes$/.test(name)) return bytes(value);
  if (/bytes_per_s$/.test(name)) return `${bytes(value)}/s`;
  return number(value);
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function duration(seconds: number | undefined): string {
  if (seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds <= 0) return "0 s";
  if (seconds < 1e-6) return `${(seconds * 1e9).toFixed(0)} ns`;
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(1)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const [whole, minutes] = [Math.round(seconds), Math.floor(Math.round(seconds) / 60)];
  const both = (large: number, unit: string, small: number, rest: string) => `${large} ${unit}${small ? ` ${small} ${rest}` : ""}`;
  if (minutes < 60) return both(minutes, "min", whole % 60, "s");
  if (minutes < 48 * 60) return both(Math.floor(minutes / 60), "h", minutes % 60, "min");
  return both(Math.floor(minutes / 1440), "d", Math.floor((minutes % 1440) / 60), "h");
}

export function empty(...words: Child[]): HTMLElement {
  return h("p", { class: "empty" }, ...words);
}

export function later(milliseconds: number, act: () => void): () => void {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = window.setTimeout(act, milliseconds);
  };
}

/** The colours of runs laid over one another; also of processes. Dark and light themes share them. */
export const PALETTE = ["#3b7dd8", "#e0762f", "#2f9e6e", "#a45bc4", "#c94f4f", "#8a8d1f", "#2a9aa8", "#c25a93"];
export const colourOf = (index: number): string => PALETTE[index % PALETTE.length] as string;

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
