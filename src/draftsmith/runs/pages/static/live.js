// Looks again every two seconds and puts the new body in place of the old, unless somebody is reading a selection.
"use strict";
const live = document.getElementById("live");
const state = document.getElementById("state");

async function look() {
  if (document.hidden || String(document.getSelection())) return;
  const log = live.querySelector(".log");
  const open = [...live.querySelectorAll("details")].map((part) => part.open);
  const place = log && log.scrollTop;
  const follows = log && log.scrollHeight - log.scrollTop - log.clientHeight < 8;
  try {
    const answer = await fetch(location.pathname + "?part", { cache: "no-store" });
    if (!answer.ok) throw new Error("it answered " + answer.status);
    live.innerHTML = await answer.text();
    live.querySelectorAll("details").forEach((part, i) => { if (i < open.length) part.open = open[i]; });
    const fresh = live.querySelector(".log");
    if (fresh) fresh.scrollTop = follows || place === null ? fresh.scrollHeight : place;
    state.className = "";
    state.textContent = "Read-only. Last look at " + new Date().toLocaleTimeString() + ".";
  } catch (error) {
    state.className = "lost";
    state.textContent = "No answer from the dashboard (" + error.message + "); what you see is old.";
  }
}

const log = live.querySelector(".log");
if (log) log.scrollTop = log.scrollHeight;
setInterval(look, 2000);
look();
