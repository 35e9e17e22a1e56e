"""A server that speaks MCP's lines itself: it starts at once, and may misbehave. Its tools are listed over two pages."""

import json
import os
import sys
import threading
import time

TOOLS = ["count", "fail", "leave", "wait", "freeze", "picture", "nothing", "pid"]
SCHEMA = {"type": "object", "properties": {"seconds": {"type": "number"}}}
writing = threading.Lock()
num_calls = 0


def answer(request, result):
    with writing:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


def text(value):
    return {"content": [{"type": "text", "text": str(value)}]}


def call(request):
    global num_calls
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    num_calls += 1
    if name == "count":
        answer(request, text(num_calls))
    elif name == "fail":
        answer(request, text("it failed") | {"isError": True})
    elif name == "leave":
        os._exit(3)
    elif name == "wait":
        threading.Timer(arguments["seconds"], answer, (request, text("waited"))).start()
    elif name == "freeze":
        time.sleep(arguments["seconds"])
    elif name == "picture":
        picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
        page = {"type": "resource", "resource": {"uri": "file:///page", "text": "a page"}}
        answer(request, {"content": [{"type": "text", "text": "look:"}, picture, page]})
    elif name == "nothing":
        answer(request, {"content": [], "structuredContent": {"value": 7}})
    elif name == "pid":
        answer(request, text(f"{os.getpid()} {os.environ.get('OWN')} {os.environ.get('SECRET')}"))


def main():
    if sys.argv[1:] == ["broken"]:
        sys.exit("this server has no configuration")
    for line in sys.stdin:
        request = json.loads(line)
        method, params = request.get("method"), request.get("params") or {}
        if method == "initialize":
            about = {"name": "wire", "version": "1"}
            version = params["protocolVersion"]
            answer(request, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
        elif method == "tools/list":
            tools = [{"name": name, "description": f"Tool {name}.", "inputSchema": SCHEMA} for name in TOOLS]
            is_second = params.get("cursor") == "more"
            answer(request, {"tools": tools[4:]} if is_second else {"tools": tools[:4], "nextCursor": "more"})
        elif method == "tools/call":
            call(request)


if __name__ == "__main__":
    main()
