// The shell: which runs, which page, and the address that reopens the same view.
//
//   #/overview?run=demo&with=demo-2,demo-3&smooth=0.6
//
// A page is mounted once per visit and told when its run has changed; the list of runs is asked for every POLL_MS while
// the window is seen. A report is the same shell over data inside the file.

import "./style.css";
import { duration, empty, figure, h, put, replace } from "./dom";
import { Embedded, Server, type Report, type Source } from "./source";
import type { RunSummary } from "./types";
import { configPage } from "./config";
import { flowPage } from "./flow";
import { guardsPage } from "./guards";
import { overviewPage } from "./overview";
import { rolloutsPage } from "./rollouts";
import { systemPage } from "./system";
import { timelinePage } from "./timeline";

const POLL_MS = 2000;

export interface Context {
  source: Source;
  run: RunSummary;
  /** The shown run first, then those laid over it. */
  runs: RunSummary[];
  params: URLSearchParams;
  /** Change the address without leaving the page. */
  set(changes: Record<string, string | null>): void;
  go(page: string, changes?: Record<string, string | null>): void;
  href(page: string, changes?: Record<string, string | null>): string;
}

export interface Mounted {
  /** The run's files have grown, or its status has changed. */
  refresh?(): void;
  close?(): void;
}

export type Page = (root: HTMLElement, context: Context) => Mounted;

const PAGES: [string, string, Page][] = [
  ["overview", "Overview", overviewPage],
  ["timeline", "Timeline", timelinePage],
  ["flow", "Flow", flowPage],
  ["rollouts", "Rollouts", rolloutsPage],
  ["guards", "Guards", guardsPage],
  ["config", "Config", configPage],
  ["system", "System", systemPage],
];

class Shell {
  private runs: RunSummary[] = [];
  private mounted: Mounted = {};
  private shown = "";
  private seen = "";
  private readonly aside = h("aside", { "aria-label": "Runs" });
  private readonly nav = h("nav", { "aria-label": "Pages" });
  private readonly head = h("div", { class: "head" });
  private readonly page = h("div", { id: "page", tabindex: -1 });
  private readonly notice = h("div", { class: "notice", role: "status" });

  constructor(private readonly source: Source, root: HTMLElement) {
    const bar = h("header", {}, h("a", { class: "logo", href: "#/overview" }, "rill"), this.nav, themeButton());
    put(root, h("a", { class: "skip", href: "#page", onclick: (event: Event) => (event.preventDefault(), this.page.focus()) }, "Skip to the page"), bar, h("div", { class: "body" }, this.aside, h("main", { class: "content" }, this.notice, this.head, this.page)));
    if (!source.isLive) this.aside.hidden = true;
    addEventListener("hashchange", () => this.show());
    addEventListener("keydown", (event) => this.key(event));
  }

  async begin(): Promise<void> {
    await this.poll();
    this.show();
    if (this.source.isLive) setInterval(() => document.hidden || void this.poll(), POLL_MS);
  }

  private async poll(): Promise<void> {
    try {
      this.runs = await this.source.runs(this.where().runs.map((one) => one.key));
      replace(this.notice);
    } catch (error) {
      replace(this.notice, h("p", { class: "problem" }, String((error as Error).message)));
      return;
    }
    this.list();
    const { run, runs } = this.where();
    const seen = JSON.stringify(runs.map((one) => [one.key, one.version, one.status, one.indexed]));
    if (this.shown && run && seen !== this.seen) this.mounted.refresh?.();
    if (this.shown && run && run.status === "running" && seen === this.seen) this.mounted.refresh?.();
    if (!this.shown && run) this.show();
    this.seen = seen;
    if (run) this.title(run);
  }

  private where(): { page: string; params: URLSearchParams; run: RunSummary | undefined; runs: RunSummary[] } {
    const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const params = new URLSearchParams(query);
    const run = this.runs.find((one) => one.key === params.get("run")) ?? (params.get("run") ? undefined : this.runs[0]);
    const others = (params.get("with") ?? "").split(",").map((key) => this.runs.find((one) => one.key === key && one !== run));
    return { page: PAGES.some(([name]) => name === path) ? path : "overview", params, run, runs: [run, ...others].filter((one): one is RunSummary => one !== undefined) };
  }

  private show(): void {
    const { page, params, run, runs } = this.where();
    this.links(page, params);
    this.list();
    if (!run) {
      this.mounted.close?.();
      [this.mounted, this.shown] = [{}, ""];
      replace(this.head);
      const wanted = params.get("run");
      replace(this.page, wanted && this.runs.length ? empty("There is no run ", h("b", {}, wanted), " here. Choose one of the list.") : empty("No runs yet. Start one with ", h("code", {}, "rill train demo"), ": it appears here by itself."));
      return;
    }
    const shown = `${page} ${runs.map((one) => one.key).join()}`;
    this.title(run);
    if (shown === this.shown && this.own === location.hash) return;
    this.mounted.close?.();
    replace(this.page);
    this.shown = shown;
    this.own = location.hash;
    const make = PAGES.find(([name]) => name === page)![2];
    this.mounted = make(this.page, this.context(run, runs));
  }

  /** The address that the page itself has set: no reason to mount it again. */
  private own = "";

  private context(run: RunSummary, runs: RunSummary[]): Context {
    const shell = this;
    return {
      source: this.source,
      run,
      runs,
      get params() {
        return shell.where().params;
      },
      set(changes) {
        shell.own = shell.address(shell.where().page, changes);
        history.replaceState(null, "", shell.own);
        shell.links(shell.where().page, shell.where().params);
      },
      go(page, changes = {}) {
        location.hash = shell.address(page, changes).slice(1);
      },
      href: (page, changes = {}) => shell.address(page, changes),
    };
  }

  private address(page: string, changes: Record<string, string | null>): string {
    const { page: now, params } = this.where();
    const kept = new URLSearchParams(page === now ? params : [...params].filter(([name]) => name === "run" || name === "with"));
    for (const [name, value] of Object.entries(changes)) if (value === null || value === "") kept.delete(name);
      else kept.set(name, value);
    const query = kept.toString();
    return `#/${page}${query ? `?${query}` : ""}`;
  }

  private links(page: string, params: URLSearchParams): void {
    const run = params.get("run");
    const both = { run, with: params.get("with") };
    replace(this.nav, ...PAGES.map(([name, title]) => h("a", { href: this.address(name, both), "aria-current": name === page ? "page" : undefined }, title)));
    this.nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  private title(run: RunSummary): void {
    document.title = `${run.name}: rill`;
    replace(
      this.head,
      h("h1", {}, run.name),
      h("span", { class: `status ${run.status}` }, run.status),
      h("span", { class: "soft" }, `step ${run.step}, ${duration(run.lasted_s)}`),
      run.indexed !== null && run.indexed < 0.995 ? h("span", { class: "soft" }, `reading its logs for the first time: ${(100 * run.indexed).toFixed(0)} %`) : null,
      run.message ? h("span", { class: "soft message" }, run.message) : null,
    );
  }

  private list(): void {
    if (!this.source.isLive) return;
    const { params, run } = this.where();
    const over = new Set((params.get("with") ?? "").split(",").filter(Boolean));
    const focused = document.activeElement?.getAttribute("data-key");
    const rows = this.runs.map((one) => {
      const toggle = () => {
        if (!over.delete(one.key)) over.add(one.key);
        location.hash = this.address(this.where().page, { run: run?.key ?? one.key, with: [...over].join(",") }).slice(1);
      };
      return h(
        "li",
        { class: one === run ? "chosen" : "" },
        h("input", { type: "checkbox", "aria-label": `lay ${one.name} over`, title: "lay over the shown run", checked: over.has(one.key) || one === run, disabled: one === run, "data-key": `with ${one.key}`, onchange: toggle }),
        h(
          "a",
          { href: this.address(this.where().page, { run: one.key, with: [...over].filter((key) => key !== one.key).join(",") }), "aria-current": one === run ? "true" : undefined, "data-key": one.key },
          h("span", { class: `dot ${one.status}`, title: one.status }),
          h("span", { class: "name" }, one.name),
          h("span", { class: "soft" }, `step ${one.step}${one.value === null ? "" : ", " + figure(one.headline, one.value)}${/running|finished/.test(one.status) ? "" : ", " + one.status}`),
        ),
      );
    });
    const isOpen = this.aside.querySelector("details")?.open ?? matchMedia("(min-width: 900px)").matches;
    replace(this.aside, h("details", { open: isOpen }, h("summary", {}, `${this.runs.length} run${this.runs.length === 1 ? "" : "s"}`), h("ul", {}, ...rows)));
    if (focused) this.aside.querySelector<HTMLElement>(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  /** 1 to 7 choose a page, where nothing is being typed. */
  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
    const page = PAGES[Number(event.key) - 1];
    if (page) location.hash = this.address(page[0], {}).slice(1);
  }
}

function themeButton(): HTMLElement {
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    theme = localStorage.getItem("rill-theme") ?? "auto";
  } catch {
    // a file opened from disk may have no storage
  }
  const button = h("button", { class: "theme", title: "light or dark", onclick: () => apply(themes[(themes.indexOf(theme) + 1) % 3]!) });
  const apply = (next: string) => {
    theme = next;
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    const sign = { auto: "◐", light: "○", dark: "●" }[next] ?? "";
    button.setAttribute("aria-label", `theme: ${next}`);
    replace(button, sign, h("span", { class: "wide" }, ` ${next}`));
    try {
      localStorage.setItem("rill-theme", next);
    } catch {
      // as above
    }
    dispatchEvent(new Event("theme"));
  };
  apply(themes.includes(theme) ? theme : "auto");
  return button;
}

const embedded = document.getElementById("rill-report");
const source = embedded ? new Embedded(JSON.parse(embedded.textContent ?? "null") as Report) : new Server();
void new Shell(source, document.getElementById("app")!).begin();
