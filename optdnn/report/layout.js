"use strict";
// Where the operators of a network lie. A deep network would be one thin column, and a layered layout of hundreds of operators takes
// long. So the order of the run is cut where few values pass, dagre lays each piece out, and the pieces fill columns like text.

const LEAST_PIECE = 10, MOST_PIECE = 120, LONG_EDGE = 60;
const ROW_GAP = 30, COLUMN_GAP = 84, NODE_GAP = 18, CORNER = 10;

// Numbers of the nodes at which a piece begins. An edge over more than LONG_EDGE nodes (a mask that all layers read) does not count.
function pieceStarts(count, edges) {
  const reach = new Array(count).fill(-1);
  for (const [from, to] of edges) if (to - from <= LONG_EDGE) reach[from] = Math.max(reach[from], to);
  const passing = new Array(count + 1).fill(0); // values that pass between node i - 1 and node i
  reach.forEach((to, from) => { for (let i = from + 1; i <= to; i++) passing[i]++; });
  const starts = [0];
  for (let i = 1; i < count; i++) {
    const begin = starts[starts.length - 1];
    if (i - begin >= LEAST_PIECE && passing[i] <= 1 && count - i >= 3) starts.push(i);
    else if (i - begin >= MOST_PIECE) {
      let best = i;
      for (let k = i; k > begin + MOST_PIECE / 2; k--) if (passing[k] < passing[best]) best = k;
      starts.push(best);
      i = best;
    }
  }
  return starts;
}

// One piece by dagre: adds x, y (its corner is 0, 0) to each box, and gives the points of the edges inside.
function layPiece(boxes, first, end, edges) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ nodesep: NODE_GAP, ranksep: ROW_GAP, edgesep: 12, marginx: 0, marginy: 0 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (let k = first; k < end; k++) graph.setNode(String(k), { width: boxes[k].width, height: boxes[k].height });
  for (const [from, to] of edges) graph.setEdge(String(from), String(to));
  dagre.layout(graph);
  for (let k = first; k < end; k++) Object.assign(boxes[k], { x: graph.node(String(k)).x, y: graph.node(String(k)).y });
  return { first, end, width: graph.graph().width, height: graph.graph().height,
           lines: edges.map(([from, to]) => ({ from, to, points: graph.edge(String(from), String(to)).points })) };
}

// The piece at which each column begins, if columns may be this high.
function columnStarts(pieces, most) {
  const starts = [0];
  let y = 0;
  pieces.forEach((piece, k) => {
    if (y > 0 && y + piece.height > most) { starts.push(k); y = 0; }
    y += piece.height + ROW_GAP;
  });
  return starts;
}

// So many columns, the highest as low as it can be.
function evenColumns(pieces, columns) {
  let low = Math.max(...pieces.map((p) => p.height)), high = pieces.reduce((sum, p) => sum + p.height + ROW_GAP, 0);
  while (high - low > 8) {
    const middle = (low + high) / 2;
    if (columnStarts(pieces, middle).length <= columns) high = middle;
    else low = middle;
  }
  return new Set(columnStarts(pieces, high));
}

// Move each piece below the one before it, so that the value between them runs straight; then set the columns side by side.
function stackPieces(pieces, boxes, links, columns) {
  const starts = evenColumns(pieces, columns), placed = [], spans = [];
  let y = 0;
  pieces.forEach((piece, k) => {
    const link = starts.has(k) ? undefined : links[k];
    const shift = link ? placed[k - 1].shift + boxes[link[0]].x - boxes[link[1]].x : -piece.width / 2;
    if (starts.has(k)) { spans.push({ low: shift, high: shift + piece.width }); y = 0; }
    const span = spans[spans.length - 1];
    Object.assign(span, { low: Math.min(span.low, shift), high: Math.max(span.high, shift + piece.width) });
    placed.push({ column: spans.length - 1, shift, y });
    y += piece.height + ROW_GAP;
  });
  let right = 0;
  const left = spans.map(({ low, high }) => { const at = right - low; right += high - low + COLUMN_GAP; return at; });
  return { placed, left, gutters: spans.map(({ high }, c) => left[c] + high + COLUMN_GAP / 2), width: right - COLUMN_GAP,
           height: Math.max(...pieces.map((p, k) => placed[k].y + p.height)) };
}

function packed(pieces, boxes, edges, aspect) {
  const links = pieces.map((piece, k) => (k === 0 ? undefined : edges.find(([from, to]) =>
    from >= pieces[k - 1].first && from < piece.first && to >= piece.first && to < piece.end)));
  let best = null;
  for (let columns = 1; columns <= Math.min(24, pieces.length); columns++) {
    const stack = stackPieces(pieces, boxes, links, columns);
    const misfit = Math.abs(Math.log(stack.width / stack.height / aspect));
    if (best === null || misfit < best.misfit) best = { ...stack, misfit };
  }
  return best;
}

// A polyline with rounded corners, as the text of an SVG path.
function rounded(points) {
  let text = `M${points[0].x} ${points[0].y}`;
  for (let k = 1; k < points.length - 1; k++) {
    const [a, b, c] = [points[k - 1], points[k], points[k + 1]];
    const cut = (p) => { const d = Math.hypot(p.x - b.x, p.y - b.y) || 1, r = Math.min(CORNER, d / 2);
                         return `${b.x + (p.x - b.x) * r / d} ${b.y + (p.y - b.y) * r / d}`; };
    text += `L${cut(a)}Q${b.x} ${b.y} ${cut(c)}`;
  }
  const last = points[points.length - 1];
  return `${text}L${last.x} ${last.y}`;
}

// The line of a value between two pieces: straight down in a column, through the gutter to the next column, else a wide curve.
function lineBetween(a, b, gutters) {
  const begin = { x: a.x, y: a.y + a.height / 2 }, end = { x: b.x, y: b.y - b.height / 2 };
  if (b.column === a.column + 1) {
    const x = gutters[a.column], half = ROW_GAP / 2;
    return rounded([begin, { x: begin.x, y: begin.y + half }, { x, y: begin.y + half }, { x, y: end.y - half }, { x: end.x, y: end.y - half }, end]);
  }
  const bend = Math.max(20, Math.abs(end.y - begin.y) / 3);
  return `M${begin.x} ${begin.y}C${begin.x} ${begin.y + bend} ${end.x} ${end.y - bend} ${end.x} ${end.y}`;
}

// Lay a network out in about the proportions `aspect` (width over height). `boxes` have width and height and get x and y (their
// middle) and their column. Pauses between pieces, so that the page answers meanwhile. Resolves to { width, height, lines }.
async function layOut(boxes, edges, aspect) {
  const starts = pieceStarts(boxes.length, edges), ends = [...starts.slice(1), boxes.length];
  const pieceOf = new Array(boxes.length);
  starts.forEach((start, p) => pieceOf.fill(p, start, ends[p]));
  const inside = starts.map(() => []), between = [];
  for (const edge of edges) (pieceOf[edge[0]] === pieceOf[edge[1]] ? inside[pieceOf[edge[0]]] : between).push(edge);
  const pieces = [];
  let paused = performance.now();
  for (let p = 0; p < starts.length; p++) {
    pieces.push(layPiece(boxes, starts[p], ends[p], inside[p]));
    if (performance.now() - paused > 40) {
      await new Promise((resolve) => setTimeout(resolve));
      paused = performance.now();
    }
  }
  const stack = packed(pieces, boxes, between, aspect), lines = [];
  pieces.forEach((piece, p) => {
    const { column, shift, y } = stack.placed[p], dx = stack.left[column] + shift;
    for (let k = piece.first; k < piece.end; k++) Object.assign(boxes[k], { x: boxes[k].x + dx, y: boxes[k].y + y, column });
    for (const line of piece.lines)
      lines.push({ from: line.from, to: line.to, path: rounded(line.points.map((q) => ({ x: q.x + dx, y: q.y + y }))) });
  });
  for (const [from, to] of between)
    lines.push({ from, to, path: lineBetween(boxes[from], boxes[to], stack.gutters), far: to - from > LONG_EDGE });
  return { width: stack.width, height: stack.height, lines };
}
