// The live view: figures, the tree, and the lanes of the last seconds, drawn from the agent's own snapshots.
import { events, headers } from "./stream.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 6;
const FADE = 0.8; // seconds that a tree stays visible, faintly, once nothing is left of it
let snapshot = null; // the newest
let entries = []; // what happened in the last seconds, [number, kind, begin, end, count, accepted, held]
let offset = 0; // the agent's clock minus this page's, in seconds
const places = new Map(); // node -> where it is drawn now, so that it glides, and what with

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const now = () => performance.now() / 1000;

async function watch() {
  for (;;) {
    try {
      for await (const shot of events("live", { headers: headers() })) take(shot);
    } catch {
      // said below; the agent may come back
    }
    state("no agent");
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}

function take(shot) {
  offset = shot.now - now();
  snapshot = shot;
  entries = [...entries, ...shot.entries].filter((entry) => entry[3] > shot.now - SECONDS - 2);
  state(shot.link.state, shot.link.reason);
  figures(shot);
}

function state(name, reason = "") {
  $("link").dataset.state = name;
  $("link").lastElementChild.textContent = name;
  $("link").title = name === "connected" ? "" : reason;
}

function figures({ speed, link }) {
  put("trip", link.state === "connected" ? (1000 * link.round_trip).toFixed(0) : null, "ms");
  if (!speed) return;
  put("rate", speed.rate ? speed.rate.toFixed(speed.rate < 100 ? 1 : 0) : null);
  put("plain", speed.plain_rate ? speed.plain_rate.toFixed(1) : null, "tok/s");
  put("gain", speed.rate && speed.plain_rate ? (speed.rate / speed.plain_rate).toFixed(2) : null, "×");
  put("hits", speed.tokens ? (100 * speed.hit_rate).toFixed(0) : null, "%");
  put("hidden", speed.hidden === null ? null : (100 * speed.hidden).toFixed(0), "%");
}

function put(id, value, unit = "") {
  const place = $(id);
  place.textContent = value ?? "–";
  if (value !== null && unit) place.append(Object.assign(document.createElement("small"), { textContent: unit }));
}

// ---- drawing

function canvas(id) {
  const box = $(id);
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = box;
  if (box.width !== Math.round(width * ratio) || box.height !== Math.round(height * ratio)) {
    box.width = Math.round(width * ratio);
    box.height = Math.round(height * ratio);
  }
  const pen = box.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** How far below the root each node is; parents come before their children. */
function depthsOf(nodes) {
  const depths = new Map([[-1, 0]]);
  for (const [id, parent] of nodes) depths.set(id, depths.get(parent) + 1);
  return depths;
}

/** Rows and depths of the nodes: the likeliest chain runs straight, its rivals hang below. */
function layout(nodes) {
  const below = new Map();
  for (const node of nodes) below.set(node[1], [...(below.get(node[1]) ?? []), node]);
  const placed = [];
  let rows = 0;
  const place = (parent, depth, row) => {
    const children = (below.get(parent) ?? []).sort((a, b) => b[3] - a[3]);
    children.forEach((node, i) => {
      const own = i === 0 ? row : ++rows;
      placed.push({ node, depth, row: own });
      place(node[0], depth + 1, own);
    });
  };
  place(-1, 1, 0);
  return placed;
}

function spelt(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "\u2009") || "·";
}

function drawTree() {
  const { pen, width, height } = canvas("tree");
  const tree = snapshot?.tree;
  pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  if (!tree) return hint(pen, width, height, "The tree appears while an answer is written.");
  const top = 30;
  const root = tail(pen, tree.tail, width, top);
  const depths = depthsOf(tree.nodes);
  const columns = spread(pen, tree.nodes, depths, root, width);
  const placed = layout(tree.nodes.filter(([id]) => depths.get(id) < columns.length));
  const seen = new Set(placed.map(({ node }) => `${tree.sid}.${node[0]}`));
  ghosts(pen, seen);
  const at = new Map([[-1, { x: root, y: top }]]);
  for (const { node, depth, row } of placed) {
    const goal = { x: columns[depth], y: top + 25 * row };
    if (goal.y > height - 14 || !at.has(node[1])) continue;
    const place = glide(tree.sid, node[0], goal, at.get(node[1]) ?? goal);
    at.set(node[0], place);
    branch(pen, at.get(node[1]), place, node);
  }
}

/** Where the next tree has not come yet, the last one as it stood, on its way out. */
function ghosts(pen, seen) {
  for (const [key, place] of places) {
    if (seen.has(key)) continue;
    place.gone ??= now();
    const left = seen.size ? 0 : 1 - (now() - place.gone) / FADE;
    if (left <= 0) places.delete(key);
    else chip(pen, place, place.label, place.sent, 0.22 * left, 0.4 * left);
  }
}

/** The end of the text, running up to the root; returns where the root is. */
function tail(pen, tokens, width, y) {
  const text = tokens.join("").replaceAll("\n", "⏎");
  const room = Math.min(width * 0.34, 240);
  let shown = text;
  while (shown && pen.measureText(shown).width > room) shown = shown.slice(1);
  pen.fillStyle = color("own");
  pen.textAlign = "right";
  pen.fillText(shown.trimStart(), room + 14, y);
  pen.textAlign = "left";
  return room + 20;
}

/** The x of every depth that fits: a column is as wide as its widest token. */
function spread(pen, nodes, depths, root, width) {
  const widest = [];
  for (const [id, , text] of nodes) {
    const depth = depths.get(id);
    widest[depth] = Math.max(widest[depth] ?? 0, pen.measureText(spelt(text)).width);
  }
  const columns = [root];
  let x = root + 22;
  for (let depth = 1; depth < widest.length && x + widest[depth] + 16 < width; depth++) {
    columns[depth] = x;
    x += widest[depth] + 36;
  }
  return columns;
}

function glide(sid, id, goal, start) {
  const key = `${sid}.${id}`;
  const place = places.get(key) ?? { x: (start.x + goal.x) / 2, y: goal.y };
  place.x += (goal.x - place.x) * 0.35;
  place.y += (goal.y - place.y) * 0.35;
  places.set(key, place);
  return place;
}

function branch(pen, from, to, [, , text, weight, sent]) {
  to.label = spelt(text);
  to.sent = sent;
  to.width = pen.measureText(to.label).width + 14;
  const likely = Math.max(0.25, Math.exp(weight));
  const x = from.x + (from.width ?? 0);
  pen.globalAlpha = likely;
  pen.strokeStyle = color("draft");
  pen.lineWidth = 0.75 + 2 * likely;
  pen.beginPath();
  pen.moveTo(x, from.y);
  pen.bezierCurveTo((x + to.x) / 2, from.y, (x + to.x) / 2, to.y, to.x, to.y);
  pen.stroke();
  pen.globalAlpha = 1;
  chip(pen, to, null, false, 0, 1); // so that branches pass behind
  chip(pen, to, to.label, sent, sent ? Math.max(0.22, likely) : Math.max(0.45, likely), Math.max(0.75, likely));
}

function chip(pen, { x, y, width }, label, sent, body, text) {
  pen.globalAlpha = label === null ? 1 : body;
  pen.fillStyle = sent ? color("draft") : color("sheet");
  pen.strokeStyle = color("draft");
  pen.lineWidth = 1.25;
  pen.beginPath();
  pen.roundRect(x, y - 10, width, 20, 6);
  pen.fill();
  if (label === null) return;
  pen.stroke();
  pen.globalAlpha = text;
  pen.fillStyle = sent && body > 0.6 ? color("sheet") : color("ink");
  pen.fillText(label, x + 7, y + 0.5);
  pen.globalAlpha = 1;
}

function hint(pen, width, height, text) {
  pen.fillStyle = color("soft");
  pen.textAlign = "center";
  pen.fillText(text, width / 2, height / 2);
  pen.textAlign = "left";
}

function drawLanes() {
  const { pen, width, height } = canvas("lanes");
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  const left = 62;
  const end = now() + offset;
  const x = (time) => left + ((time - end + SECONDS) / SECONDS) * (width - left - 8);
  const [edge, cloud] = [38, height - 50];
  pen.fillStyle = color("soft");
  pen.fillText("device", 12, edge);
  pen.fillText("verifier", 12, cloud);
  ticks(pen, x, end, height);
  const half = (snapshot?.link.round_trip ?? 0) / 2;
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, height - 20);
  pen.clip();
  for (const entry of entries) lane(pen, x, edge, cloud, half, entry);
  pen.restore();
}

function ticks(pen, x, end, height) {
  pen.strokeStyle = color("line");
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (let second = Math.ceil(end - SECONDS); second <= end; second++) {
    pen.beginPath();
    pen.moveTo(x(second), 12);
    pen.lineTo(x(second), height - 22);
    pen.stroke();
    if (second < end - 0.6) pen.fillText(`−${(end - second).toFixed(0)} s`, x(second), height - 11);
  }
  pen.textAlign = "left";
}

function lane(pen, x, edge, cloud, half, [, kind, begin, end, count, accepted, held]) {
  if (kind === "draft") bar(pen, x(begin), x(end), edge, 13, color("draft"), 1);
  else if (kind === "sent") flight(pen, x(begin), edge + 9, x(begin + half), cloud - 12, color("draft"), Math.min(count / 12, 1));
  else {
    const arrived = begin + (end - begin) - half;
    bar(pen, x(begin - half), x(arrived), cloud, 13, color(held ? "own" : "miss"), count);
    flight(pen, x(arrived), cloud - 12, x(end), edge + 9, color("own"), accepted ? 0.8 : 0.3);
  }
}

function bar(pen, from, to, y, height, fill, weight) {
  pen.fillStyle = fill;
  pen.globalAlpha = 0.9;
  const tall = Math.min(height + 3 * (weight - 1), 24);
  pen.beginPath();
  pen.roundRect(from, y - tall / 2, Math.max(to - from - 1.5, 1.5), tall, 2.5);
  pen.fill();
  pen.globalAlpha = 1;
}

function flight(pen, x1, y1, x2, y2, stroke, strength) {
  pen.strokeStyle = stroke;
  pen.globalAlpha = 0.15 + 0.5 * strength;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
  pen.globalAlpha = 1;
}

function draw() {
  drawTree();
  drawLanes();
  requestAnimationFrame(draw);
}

watch();
requestAnimationFrame(draw);
