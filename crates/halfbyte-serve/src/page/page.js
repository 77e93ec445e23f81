// A conversation with the server that this page came from, and what it does meanwhile. Nothing else is asked, nothing is kept but the key,
// for as long as the tab is open.
"use strict";

const $ = (id) => document.getElementById(id);
const history = [];
let models = [];
let running = null;

function headers() {
  const all = { "Content-Type": "application/json" };
  if ($("key").value) all.Authorization = `Bearer ${$("key").value}`;
  return all;
}

/** The message of an answer that is none. */
async function why(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

/** A turn, shown; what is said goes in as text, never as markup. */
function show(role, text) {
  $("empty").hidden = true;
  const article = document.createElement("article");
  article.className = role;
  const who = document.createElement("h2");
  who.textContent = role === "user" ? "You" : "Model";
  const said = document.createElement("div");
  said.className = "text";
  said.textContent = text;
  article.append(who, said);
  $("conversation").append(article);
  toEnd(true);
  return article;
}

function toEnd(always) {
  const box = $("conversation");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function parameters() {
  const wanted = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"]) {
    const field = $(name);
    if (field.value !== "") wanted[name] = Number(field.value);
  }
  return wanted;
}

function busy(is) {
  $("stop").disabled = !is;
  $("send").disabled = is;
  $("again").disabled = is || !history.some((turn) => turn.role === "assistant");
  $("clear").disabled = is;
}

/** Server-sent events of a body, each as its data. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/** Asks for the turn that follows; a model without a template continues what was said last. */
async function answer() {
  fail("");
  const model = $("model").value;
  const chats = models.find((known) => known.id === model)?.chat ?? true;
  const body = { model, ...parameters(), stream: true, stream_options: { include_usage: true } };
  if (chats) {
    const system = $("system").value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  } else {
    body.prompt = history.map((turn) => turn.content).join("");
  }
  const article = show("assistant", "");
  const said = article.querySelector(".text");
  article.classList.add("busy");
  running = new AbortController();
  busy(true);
  const begun = performance.now();
  let first = 0;
  let tokens = 0;
  let text = "";
  let note = "";
  try {
    const path = chats ? "/v1/chat/completions" : "/v1/completions";
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error(await why(response));
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (piece) {
        first ||= performance.now();
        tokens += 1;
        text += piece;
        said.textContent = text;
        toEnd(false);
      }
      for (const call of choice?.delta?.tool_calls ?? []) {
        text += `${call.function.name}(${call.function.arguments})`;
        said.textContent = text;
      }
      if (choice?.finish_reason === "length") note = "The most new tokens are written.";
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      speed(tokens, first, begun);
    }
  } catch (error) {
    if (error.name === "AbortError") note = "Stopped.";
    else fail(error.message);
  }
  running = null;
  article.classList.remove("busy");
  if (text) {
    history.push({ role: "assistant", content: text });
    $("said").textContent = `Model: ${text}`;
  } else {
    article.remove();
  }
  if (note && text) {
    const line = document.createElement("p");
    line.className = "note";
    line.textContent = note;
    article.append(line);
  }
  busy(false);
  $("prompt").focus();
}

function speed(tokens, first, begun) {
  if (!first) return;
  const seconds = (performance.now() - first) / 1000;
  const rate = seconds > 0 && tokens > 1 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  $("speed").textContent = `${rate}first after ${((first - begun) / 1000).toFixed(2)} s`;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  history.push({ role: "user", content: text });
  show("user", text);
  answer();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

$("stop").addEventListener("click", () => running?.abort());

$("again").addEventListener("click", () => {
  if (running) return;
  while (history.length && history.at(-1).role === "assistant") {
    history.pop();
    $("conversation").lastElementChild.remove();
  }
  if (history.length) answer();
});

$("clear").addEventListener("click", () => {
  history.length = 0;
  for (const article of document.querySelectorAll("article")) article.remove();
  $("empty").hidden = false;
  $("speed").textContent = "";
  fail("");
  busy(false);
  $("prompt").focus();
});

// What the server does: sums over its models, from what it counts for Prometheus.

const seen = [];
const POINTS = 120;

function sums(text) {
  const all = {};
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const state = /state="(\w+)"/.exec(match[2] ?? "")?.[1];
    const name = state ? `${match[1]}.${state}` : match[1];
    all[name] = (all[name] ?? 0) + Number(match[3]);
  }
  return all;
}

async function look() {
  let response;
  try {
    response = await fetch("/metrics", { headers: headers() });
  } catch {
    return;
  }
  if (!response.ok) return;
  const now = sums(await response.text());
  now.at = performance.now();
  const before = seen.at(-1);
  seen.push(now);
  if (seen.length > POINTS + 1) seen.shift();
  const count = (name) => now[name] ?? 0;
  $("running").textContent = count("halfbyte_texts.running");
  $("waiting").textContent = count("halfbyte_texts.waiting");
  const [used, kept, free] = ["used", "kept", "free"].map((state) => count(`halfbyte_kv_pages.${state}`));
  const pages = used + kept + free;
  $("pages").textContent = `${used} of ${pages} in use`;
  $("pagebar").setAttribute("aria-label", `${used} of ${pages} pages in use, ${kept} kept for beginnings alike`);
  const share = (part) => `${pages ? (100 * part) / pages : 0}%`;
  $("pagebar").children[0].style.width = share(used);
  $("pagebar").children[1].style.width = share(kept);
  if (!before) return;
  const rate = (name, from, to) => ((to[name] ?? 0) - (from[name] ?? 0)) / ((to.at - from.at) / 1000);
  $("rate").textContent = rate("halfbyte_chosen_tokens_total", before, now).toFixed(0);
  $("prompt_rate").textContent = rate("halfbyte_prompt_tokens_total", before, now).toFixed(0);
  graph(seen.slice(1).map((to, i) => Math.max(0, rate("halfbyte_chosen_tokens_total", seen[i], to))));
}

function graph(rates) {
  const most = Math.max(1, ...rates);
  const x = (i) => 240 - ((rates.length - 1 - i) * 240) / (POINTS - 1);
  const line = rates.map((rate, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${(58 - (54 * rate) / most).toFixed(1)}`).join("");
  const [area, path] = $("graph").children;
  path.setAttribute("d", line);
  area.setAttribute("d", `${line}L240 60L${x(0).toFixed(1)} 60Z`);
  $("graphmax").textContent = `tokens a second, the last two minutes, at most ${most.toFixed(0)}`;
}

async function begin() {
  $("key").value = sessionStorage.getItem("key") ?? "";
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return fail(await why(response));
  fail("");
  models = (await response.json()).data;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
}

$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  begin().catch((error) => fail(error.message));
});

begin().catch((error) => fail(error.message));
look();
setInterval(look, 1000);
$("prompt").focus();
