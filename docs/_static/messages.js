// Finds labkit's messages by the words of a pasted one. Values differ from run to run, so words count and numbers do not.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".message-search");
  if (!box) return;
  const wordsOf = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g) || []);
  const entries = [...document.querySelectorAll("ul.messages > li")].map((item) => ({
    item,
    words: wordsOf(item.textContent),
    length: wordsOf(item.textContent.replace(/\([^()]*\)$/, "")).size,
  }));
  const uses = new Map();
  for (const { words } of entries) for (const word of words) uses.set(word, (uses.get(word) || 0) + 1);
  const input = box.querySelector("textarea");
  const answer = box.querySelector("#message-answer");
  const sections = [...document.querySelectorAll("ul.messages")].map((list) => list.closest("section"));
  const others = [...document.querySelectorAll("article section section")].filter(
    (section) => !section.querySelector("ul.messages") && !section.closest("li"),
  );

  function show() {
    const wanted = [...wordsOf(input.value)];
    const known = wanted.filter((word) => uses.has(word));
    const rarity = (word) => Math.log(1 + entries.length / uses.get(word));
    const scored = entries.map((entry) => {
      const met = known.filter((word) => entry.words.has(word));
      const weight = met.reduce((sum, word) => sum + rarity(word), 0);
      // A long message that is met by a few words is less likely than a short one that is met whole.
      return { entry, score: weight * Math.sqrt(met.length / Math.max(entry.length, 1)) };
    });
    const best = Math.max(0, ...scored.map((each) => each.score));
    let count = 0;
    for (const { entry, score } of scored) {
      const kept = !wanted.length || (score > 0 && score >= best / 2);
      entry.item.hidden = !kept;
      entry.item.classList.toggle("best", wanted.length > 0 && best > 0 && score === best);
      count += kept ? 1 : 0;
    }
    for (const section of sections) section.hidden = !section.querySelector("li:not([hidden])");
    // What was found stands right below the box.
    for (const section of others) section.hidden = wanted.length > 0;
    answer.textContent = !wanted.length ? "" : count === 1 ? "1 message is like it" : `${count} messages are like it`;
  }

  box.hidden = false;
  input.addEventListener("input", show);
  const given = new URLSearchParams(window.location.search).get("message");
  if (given) {
    input.value = given;
    show();
  }
});
