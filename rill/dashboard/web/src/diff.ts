// The difference of two token lists: Myers' algorithm, on what is left when equal ends are taken off.

const MAX_EDITS = 1500;

export type Piece = ["same" | "gone" | "new", string];

export function diff(before: string[], after: string[]): Piece[] {
  let [head, tail] = [0, 0];
  while (head < before.length && head < after.length && before[head] === after[head]) head++;
  while (tail < before.length - head && tail < after.length - head && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail++;
  const middle = edits(before.slice(head, before.length - tail), after.slice(head, after.length - tail));
  return joined([["same", before.slice(0, head).join("")], ...middle, ["same", tail ? before.slice(-tail).join("") : ""]]);
}

function edits(a: string[], b: string[]): Piece[] {
  const whole: Piece[] = [["gone", a.join("")], ["new", b.join("")]];
  const trace: Map<number, number>[] = [];
  let ends = new Map<number, number>([[1, 0]]);
  for (let d = 0; d <= Math.min(MAX_EDITS, a.length + b.length); d++) {
    trace.push(new Map(ends));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1)) ? (ends.get(k + 1) ?? 0) : (ends.get(k - 1) ?? 0) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      ends.set(k, x);
      if (x >= a.length && x - k >= b.length) return walkBack(a, b, trace);
    }
  }
  return whole;
}

function walkBack(a: string[], b: string[], trace: Map<number, number>[]): Piece[] {
  const pieces: Piece[] = [];
  let [x, y] = [a.length, b.length];
  for (let d = trace.length - 1; d >= 0; d--) {
    const ends = trace[d]!;
    const k = x - y;
    const isDown = k === -d || (k !== d && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
    const from = isDown ? k + 1 : k - 1;
    const startX = ends.get(from) ?? 0;
    const startY = startX - from;
    while (x > startX && y > startY && x > 0 && y > 0 && a[x - 1] === b[y - 1]) {
      pieces.push(["same", a[x - 1]!]);
      x--;
      y--;
    }
    if (d === 0) break;
    if (isDown) pieces.push(["new", b[--y]!]);
    else pieces.push(["gone", a[--x]!]);
  }
  return pieces.reverse();
}

function joined(pieces: Piece[]): Piece[] {
  const found: Piece[] = [];
  for (const [kind, text] of pieces) {
    if (!text) continue;
    const last = found[found.length - 1];
    if (last?.[0] === kind) last[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
