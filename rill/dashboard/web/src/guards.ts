// Was anything wrong: what the guards found, what it means, what to do; and the end of the run's log.

import { empty, h, replace } from "./dom";
import type { Context, Mounted } from "./main";

export function guardsPage(root: HTMLElement, context: Context): Mounted {
  const load = async () => {
    try {
      const { findings, log } = await context.source.guards(context.run.key);
      const cards = findings.map((finding) =>
        h(
          "article",
          { class: `finding ${finding.action}` },
          h("h3", {}, finding.guard, h("span", { class: "soft" }, ` at step ${finding.step}${finding.action === "stop" ? ", and ended the run" : ""}`)),
          h("p", {}, finding.seen),
          h("p", {}, h("b", {}, "What to do: "), finding.meaning),
          h("p", {}, h("a", { href: context.href("overview", { zoom: `${Math.max(0, finding.step - 20)},${finding.step + 20}` }) }, "curves around it"), " · ", h("a", { href: context.href("rollouts", { from: String(Math.max(0, finding.step - 1)), to: String(finding.step) }) }, "rollouts of that step")),
        ),
      );
      replace(
        root,
        h("h2", {}, "What the guards found"),
        cards.length ? h("div", { class: "findings" }, ...cards.reverse()) : empty("Nothing. Guards look at the figures of every step: lag, mismatch, effective samples, entropy, rewards, lengths, gradients."),
        h("h2", {}, "The end of the log"),
        log ? h("pre", { tabindex: 0, "aria-label": "log" }, log) : empty("The log is empty."),
      );
    } catch (error) {
      replace(root, h("p", { class: "problem" }, (error as Error).message));
    }
  };
  void load();
  return { refresh: () => void load() };
}
