// Bundles src/ into ../static/ and writes ../static/build.json, which says what it was built from.
// tests/dashboard/test_static.py compares those sums without Node: a changed source that was not built fails there.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../static";
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.ts" },
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  outdir: out,
  banner: { js: "/* rill dashboard; bundles uPlot (MIT, Leon Sorokin) */" },
});
copyFileSync("src/index.html", `${out}/index.html`);

const sum = (path) => createHash("sha256").update(readFileSync(path)).digest("hex");
const sources = ["package.json", "package-lock.json", "tsconfig.json", "build.mjs", ...readdirSync("src").sort().map((name) => `src/${name}`)];
const built = ["app.js", "app.css", "index.html"];
const manifest = {
  sources: Object.fromEntries(sources.map((name) => [name, sum(name)])),
  built: Object.fromEntries(built.map((name) => [name, sum(`${out}/${name}`)])),
};
writeFileSync(`${out}/build.json`, JSON.stringify(manifest, null, 2) + "\n");
