// The conversation: kept in this tab, so that a reload loses nothing.
import { events, headers } from "./stream.js";

const $ = (id) => document.getElementById(id);
const messages = $("messages");
let turns = JSON.parse(sessionStorage.getItem("paceline.turns") ?? "[]");
let running = null; // an AbortController while an answer comes

function keep() {
  sessionStorage.setItem("paceline.turns", JSON.stringify(turns));
}

function shown(turn) {
  const item = document.createElement("li");
  item.className = turn.role;
  if (turn.role === "user") item.textContent = turn.content;
  else write(item, turn.tokens);
  if (turn.note) item.append(note(turn.note, turn.failed));
  messages.append(item);
  return item;
}

/** Appends tokens; a run of drafted ones is one mark, which does not begin with a space. */
function write(item, tokens) {
  for (const [text, drafted] of tokens) {
    const last = item.lastChild;
    if (!drafted) item.append(text);
    else if (last?.className === "drafted") last.append(text);
    else {
      const mark = Object.assign(document.createElement("span"), { className: "drafted" });
      const space = text.length - text.trimStart().length;
      mark.append(text.slice(space));
      item.append(text.slice(0, space), mark);
    }
  }
}

function note(text, failed) {
  const line = document.createElement("span");
  line.className = failed ? "note error" : "note";
  line.textContent = text;
  return line;
}

const narrow = matchMedia("(max-width: 860px)");
const scroller = () => (narrow.matches ? document.scrollingElement : messages);
const atEnd = () => narrow.matches || messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
function toEnd() {
  if (narrow.matches) $("ask").scrollIntoView({ block: "end" });
  else messages.scrollTop = scroller().scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  $("welcome").hidden = turns.length > 0;
}

async function ask(question) {
  turns.push({ role: "user", content: question });
  shown(turns.at(-1));
  const turn = { role: "assistant", content: "", tokens: [], note: "" };
  const item = shown(turn);
  item.classList.add("writing");
  setRunning(new AbortController());
  toEnd();
  try {
    await receive(turn, item);
  } catch (e) {
    if (e.name === "AbortError") turn.note = "stopped";
    else [turn.note, turn.failed] = [e instanceof TypeError ? "The agent cannot be reached." : e.message, true];
  }
  item.classList.remove("writing");
  if (turn.note) item.append(note(turn.note, turn.failed));
  turns.push(turn);
  keep();
  setRunning(null);
  $("question").focus();
}

async function receive(turn, item) {
  const seed = $("seed").value;
  const body = {
    model: "paceline",
    messages: turns.filter((t) => t.content).map(({ role, content }) => ({ role, content })),
    temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, Math.trunc(Number($("limit").value)) || 400),
    ...(seed === "" ? {} : { seed: Math.trunc(Number(seed)) }),
    stream: true,
    paceline_marks: true,
  };
  const options = {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal: running.signal,
  };
  for await (const chunk of events("v1/chat/completions", options)) {
    const follow = atEnd();
    const text = chunk.choices[0]?.delta.content ?? "";
    if (chunk.system_fingerprint === "draft-alone") turn.note = "The verifier is away: the draft wrote this alone.";
    if (!text) {
      if (chunk.choices[0]?.finish_reason === "length") turn.note ||= "The answer was cut: it reached the most tokens.";
      continue;
    }
    const tokens = chunk.paceline?.tokens ?? [];
    const whole = tokens.map(([t]) => t).join("") === text ? tokens : [[text, false]];
    turn.content += text;
    turn.tokens.push(...whole);
    write(item, whole);
    if (follow) toEnd();
  }
}

function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
  $("send").disabled = !box.value.trim();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  fit();
  ask(question);
});
$("question").addEventListener("input", fit);
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("forget").addEventListener("click", () => {
  running?.abort();
  turns = [];
  keep();
  messages.replaceChildren();
  setRunning(null);
});
$("ideas").addEventListener("click", (event) => event.target.closest("button") && !running && ask(event.target.textContent));
for (const id of ["temperature", "seed", "limit"]) {
  $(id).value = localStorage.getItem(`paceline.${id}`) ?? $(id).value;
  $(id).addEventListener("change", () => localStorage.setItem(`paceline.${id}`, $(id).value));
}
$("key").value = localStorage.getItem("paceline.key") ?? "";
$("key").addEventListener("change", () => {
  localStorage.setItem("paceline.key", $("key").value);
  location.reload();
});

turns.forEach(shown);
setRunning(null);
fit();
toEnd();
fetch("v1/models", { headers: headers() })
  .then((answer) => answer.json())
  .then((list) => ($("model").textContent = list.data?.[0]?.id ?? ""))
  .catch(() => {});
