// An image of a message, drawn from the bytes of its route in the control API. The page loads images from nowhere else.

import { get, path } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";

const STORED = /^[0-9a-f]{32}$/; // names an image in a request; an image that the engine fetched has its URL as its name

/** Show an image of a rollout by its name; `number` is its place among the images of the call. */
export function Picture({ rollout, name, number }) {
  const canvas = useRef(null);
  const [problem, setProblem] = useState(null);
  const isStored = STORED.test(name);
  useEffect(() => {
    if (!isStored) return undefined;
    const stop = new AbortController();
    draw(canvas.current, rollout, name, stop.signal).then(
      () => setProblem(null),
      (error) => stop.signal.aborted || setProblem(error.message),
    );
    return () => stop.abort();
  }, [rollout, name]);
  if (!isStored) return html`<div class="text">image ${number}, by URL: ${name}</div>`;
  return html`
    <canvas class="picture" role="img" aria-label=${`image ${number}`} hidden=${problem !== null} ref=${canvas}></canvas>
    ${problem && html`<div class="text">image ${number} is not shown: ${problem}</div>`}`;
}

async function draw(canvas, rollout, name, signal) {
  const response = await get(path(["rollouts", rollout, "images", name]), { accept: "image/*", signal });
  const picture = await createImageBitmap(await response.blob());
  canvas.width = picture.width;
  canvas.height = picture.height;
  canvas.getContext("2d").drawImage(picture, 0, 0);
  picture.close();
}
