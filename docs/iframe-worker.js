// A browser starts no worker for a page on the disk. This class runs the worker's script in a hidden frame instead, so that the search works there.
// Its name is the one that Material for MkDocs asks for.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      const started = new Promise((done) => script.addEventListener("load", done));
      inside.document.body.append(script);
      this.postMessage = (data) =>
        started.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
