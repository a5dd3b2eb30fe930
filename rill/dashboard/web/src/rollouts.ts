// What the model said: which groups there are, and one of them in full.

import { empty, h, later, number, replace, select } from "./dom";
import { showGroup } from "./group";
import type { Context, Mounted } from "./main";
import { inOrder } from "./source";
import type { Facets, GroupRow } from "./types";

const FILTERS = ["from", "to", "task", "prompt", "stop", "tag", "min", "max", "only", "text", "order"] as const;
const COUNT = 40;
/** As many as the server gives for one part of a search. */
const SEARCH_COUNT = 500;

export function rolloutsPage(root: HTMLElement, context: Context): Mounted {
  return new RolloutsPage(root, context);
}

class RolloutsPage implements Mounted {
  private readonly bar = h("div", { class: "bar" });
  private readonly steps = h("div", { class: "steps" });
  private readonly count = h("p", { class: "soft", role: "status" });
  private readonly list = h("ul", { class: "groups", "aria-label": "Groups" });
  private readonly more = h("button", { hidden: true, onclick: () => void this.showMore() }, "more");
  private readonly detail = h("article", { class: "group", "aria-label": "Group" });
  private rows: GroupRow[] = [];
  private facets: Facets | null = null;
  private asking: AbortController | null = null;
  private isClosed = false;
  private options = "";
  private limit = COUNT;
  private total = 0;
  private searched = 0;
  private textBytes = 0;
  private readonly search = later(150, () => void this.load());
  private readonly onkey = (event: KeyboardEvent) => this.key(event);

  constructor(root: HTMLElement, private readonly context: Context) {
    replace(root, this.bar, this.steps, h("div", { class: "browse" }, h("div", { class: "list" }, this.count, this.list, this.more), this.detail));
    addEventListener("keydown", this.onkey);
    void this.load().then(() => {
      this.open();
    });
  }

  refresh(): void {
    if (this.rows.length <= COUNT) void this.load(true).then(() => this.detail.querySelector(".empty") && this.open());
  }

  close(): void {
    this.isClosed = true;
    this.asking?.abort();
    removeEventListener("keydown", this.onkey);
  }

  private query(): Record<string, string> {
    const query: Record<string, string> = { count: String(this.context.params.get("text") ? SEARCH_COUNT : COUNT) };
    for (const name of FILTERS) if (this.context.params.get(name)) query[name] = this.context.params.get(name)!;
    return query;
  }

  private set(changes: Record<string, string | null>): void {
    this.context.set(changes);
    void this.load();
  }

  private reset(): void {
    this.set(Object.fromEntries(FILTERS.map((name) => [name, null])));
    this.drawBar();
  }

  private async load(isFresh = false): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const query: Record<string, string> = { ...this.query(), ...(this.facets && !isFresh ? {} : { facets: "1" }) };
    await this.guard(async () => {
      const found = await this.context.source.rollouts(this.context.run.key, query, asking.signal);
      if (this.isClosed) return;
      if (found.facets) this.facets = found.facets;
      [this.rows, this.total, this.searched, this.textBytes, this.limit] = [found.groups, found.total, found.searched, found.text_bytes, COUNT];
      this.drawBarIfNew();
      this.drawSteps();
      this.drawList();
      await this.searchOn(asking);
    });
  }

  private async showMore(): Promise<void> {
    this.limit += COUNT;
    const asking = (this.asking = new AbortController());
    await this.guard(async () => {
      if (this.context.params.get("text")) return this.searchOn(asking);
      const found = await this.context.source.rollouts(this.context.run.key, { ...this.query(), first: String(this.rows.length) }, asking.signal);
      this.rows.push(...found.groups);
      this.drawList();
    });
    this.drawList();
  }

  /** A search takes a bounded time for one answer; go on until all text is looked through or the list is full. */
  private async searchOn(asking: AbortController): Promise<void> {
    while (this.isSearching() && !asking.signal.aborted && !this.isClosed) {
      const next = await this.context.source.rollouts(this.context.run.key, { ...this.query(), searched: String(this.searched) }, asking.signal);
      if (next.searched <= this.searched) return;
      this.searched = next.searched;
      this.total += next.total;
      this.rows.push(...next.groups);
      inOrder(this.rows, this.context.params.get("order") ?? "newest");
      this.drawList();
    }
  }

  private isSearching(): boolean {
    return Boolean(this.context.params.get("text")) && this.searched < this.textBytes && this.rows.length < this.limit;
  }

  private async guard(act: () => Promise<void>): Promise<void> {
    try {
      await act();
    } catch (error) {
      if ((error as Error).name !== "AbortError") replace(this.count, (error as Error).message);
    }
  }

  /** What is being typed or chosen is not drawn anew. */
  private drawBarIfNew(): void {
    const { tasks, stops, tags } = this.facets!;
    const options = JSON.stringify([tasks, stops, tags]);
    if (options === this.options || this.bar.contains(document.activeElement)) return;
    this.options = options;
    this.drawBar();
  }

  private drawBar(): void {
    const { params } = this.context;
    const facets = this.facets!;
    const one = (name: string, label: string, options: string[]) => (options.length > 1 || params.get(name) ? select(label, [["", "any"], ...options.map((text): [string, string] => [text, text || "none"])], params.get(name) ?? "", (value) => this.set({ [name]: value })) : null);
    const field = (name: string, label: string, type: string) => {
      const input = h("input", { type, step: "any", class: "narrow", value: params.get(name) ?? "", "aria-label": label, placeholder: label, onchange: () => this.set({ [name]: input.value }) });
      return input;
    };
    const text = h("input", { type: "search", id: "search", placeholder: "search in all text  ( / )", "aria-label": "search in all text", value: params.get("text") ?? "", oninput: () => (this.context.set({ text: text.value }), this.search()) });
    replace(
      this.bar,
      text,
      h("span", {}, "step ", field("from", "first", "number"), " to ", field("to", "last", "number")),
      h("span", {}, "reward ", field("min", "least", "number"), " to ", field("max", "most", "number")),
      h("span", {}, "prompt ", field("prompt", "its id", "search")),
      one("task", "data", facets.tasks),
      one("stop", "ended by", facets.stops),
      one("tag", "tag", facets.tags),
      select("only", [["", "all"], ["failed", "failed rewards"], ["dropped", "dropped groups"]], params.get("only") ?? "", (value) => this.set({ only: value })),
      select("order", [["newest", "newest"], ["oldest", "oldest"], ["best", "best reward"], ["worst", "worst reward"], ["spread", "most different"], ["longest", "longest"]], params.get("order") ?? "newest", (value) => this.set({ order: value })),
      h("button", { onclick: () => this.reset() }, "reset"),
    );
  }

  /** One bar a step: its height is the mean reward. A click shows that step. */
  private drawSteps(): void {
    const all = this.facets!.steps;
    const size = Math.max(1, Math.ceil(all.length / 240));
    const bars: [number, number, number, number][] = [];
    for (let i = 0; i < all.length; i += size) {
      const part = all.slice(i, i + size);
      const groups = part.reduce((sum, [, count]) => sum + count, 0);
      bars.push([part[0]![0], part[part.length - 1]![0], groups, part.reduce((sum, [, count, reward]) => sum + count * reward, 0) / Math.max(1, groups)]);
    }
    const rewards = bars.map(([, , , reward]) => reward);
    const [low, high] = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
    const { from, to } = Object.fromEntries(this.context.params);
    const chosen = ([first, last]: [number, number, number, number]) => from !== undefined && to !== undefined && last >= Number(from) && first <= Number(to);
    replace(
      this.steps,
      ...bars.map((bar) => {
        const [first, last, groups, reward] = bar;
        const name = first === last ? `step ${first}` : `steps ${first} to ${last}`;
        const fill = h("i", {});
        fill.style.height = `${Math.max(6, (100 * (reward - low)) / (high - low))}%`;
        return h("button", { class: chosen(bar) ? "chosen" : "", title: `${name}: ${groups} groups, reward ${number(reward)}`, "aria-label": `${name}, reward ${number(reward)}`, onclick: () => (this.set(chosen(bar) ? { from: null, to: null } : { from: String(first), to: String(last) }), this.drawBar()) }, fill);
      }),
    );
    this.steps.hidden = bars.length < 2;
  }

  private drawList(): void {
    const facets = this.facets!;
    const isPart = Boolean(this.context.params.get("text")) && this.searched < this.textBytes;
    const searching = this.isSearching() ? `, searched ${((100 * this.searched) / this.textBytes).toFixed(0)} % …` : "";
    if (!facets.num_groups) replace(this.count, "No rollouts yet. A run keeps some groups of every step (rollout.log_groups); they appear here once they are indexed.");
    else replace(this.count, `${isPart ? "at least " : ""}${this.total.toLocaleString("en")} of ${facets.num_groups.toLocaleString("en")} groups${searching}`);
    const open = this.context.params.get("group");
    replace(
      this.list,
      ...this.rows.slice(0, this.limit).map((row) => {
        const squares = row.rewards.slice(0, 32).map((reward) => {
          const square = h("i", { title: `reward ${number(reward)}` });
          square.style.setProperty("--r", String(reward === null ? 0 : Math.max(0, Math.min(1, reward))));
          return square;
        });
        const id = `${row.log}.${row.place}`;
        return h(
          "li",
          {},
          h(
            "button",
            { class: open === id ? "chosen" : "", "aria-pressed": String(open === id), "data-id": id, onclick: () => this.open(row) },
            h("span", { class: "where" }, `step ${row.step}`),
            h("span", { class: "preview" }, row.preview.trim() || "(no prompt)"),
            h("span", { class: "squares" }, ...squares),
            h("span", { class: "num" }, number(row.reward), row.num_failed ? h("span", { class: "bad" }, ` ${row.num_failed} failed`) : null, row.is_dropped ? h("span", { class: "soft" }, " dropped") : null),
          ),
        );
      }),
    );
    this.more.hidden = this.limit >= this.total && !isPart;
  }

  private open(row?: GroupRow): void {
    const [log, place] = row ? [row.log, row.place] : (this.context.params.get("group")?.split(".").map(Number) ?? [this.rows[0]?.log, this.rows[0]?.place]);
    if (log === undefined || place === undefined) return void replace(this.detail, empty(this.facets?.num_groups ? "Nothing matches these filters." : "What the model says is shown here, token by token."));
    if (row) this.context.set({ group: `${log}.${place}` });
    for (const button of this.list.querySelectorAll("button")) button.className = button.dataset.id === `${log}.${place}` ? "chosen" : "";
    showGroup(this.detail, this.context, log, place, (next) => this.open(next));
    if (row && matchMedia("(max-width: 899px)").matches) this.detail.scrollIntoView({ behavior: "smooth" });
  }

  /** j and k go through the list, / to the search. */
  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as HTMLElement).tagName)) return;
    if (event.key === "/") (event.preventDefault(), document.getElementById("search")?.focus());
    const by = { j: 1, k: -1 }[event.key];
    if (!by) return;
    const at = this.rows.findIndex((row) => `${row.log}.${row.place}` === this.context.params.get("group"));
    const next = this.rows[Math.max(0, at + by)];
    if (next) this.open(next);
  }
}
