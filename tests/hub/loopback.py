"""A Hub on this machine: what `huggingface_hub` asks to create a repository, to commit to it and to read it.

Commits lie in memory as `{path: bytes}`. Large files, here safetensors, take the way of git-LFS: they are announced,
put one by one, and named in the commit.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
ROUTES = []


def route(method, pattern):
    """Register a function for a method and a path, whose groups it gets."""

    def register(function):
        ROUTES.append(
            (method, re.compile(pattern.replace("{repo}", r"([^/]+/[^/]+?)").replace("{rest}", "(.+)")), function)
        )
        return function

    return register


class Missing(Exception):
    """What is answered by 404; the code tells the client what is missing."""


class LoopbackHub:
    """The state: `repos[repo] = {"refs": {branch: commit}, "commits": {commit: files}, "messages": {commit: text}}`."""

    def __init__(self):
        self.repos, self.blobs, self.requests, self.lock = {}, {}, [], threading.RLock()

    def commit(self, repo, branch, files, message):
        known = self.repos[repo]
        text = json.dumps([len(known["commits"]), sorted((path, digest(path, data)) for path, data in files.items())])
        commit = hashlib.sha1(text.encode()).hexdigest()
        known["commits"][commit], known["messages"][commit] = files, message
        known["refs"][branch] = commit
        return commit

    def files(self, repo, revision):
        """Commit of a revision and its files."""
        if repo not in self.repos:
            raise Missing("RepoNotFound")
        commit = self.repos[repo]["refs"].get(revision, revision)
        if commit not in self.repos[repo]["commits"]:
            raise Missing("RevisionNotFound")
        return commit, self.repos[repo]["commits"][commit]

    def history(self, repo):
        """First lines of all commits, in order."""
        return list(self.repos[repo]["messages"].values())


def is_large(path):
    return path.endswith(".safetensors")


def digest(path, data):
    """SHA-256 of a large file, git's object id of another."""
    return (
        hashlib.sha256(data).hexdigest()
        if is_large(path)
        else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


@route("POST", "/api/repos/create")
def create_repo(hub, request):
    repo = f"{request.json.get('organization') or 'me'}/{request.json['name']}"
    url = {"url": f"{request.base}/{repo}", "id": repo, "name": repo}
    if repo in hub.repos:
        return request.answer({**url, "error": "You already created this model repo"}, 409, X_Error_Code="RepoExists")
    hub.repos[repo] = {"refs": {}, "commits": {}, "messages": {}, "private": request.json.get("private")}
    hub.commit(repo, "main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
    return request.answer(url)


@route("POST", "/api/validate-yaml")
def validate_card(hub, request):
    request.answer({"errors": [], "warnings": []})


@route("POST", "/api/models/{repo}/branch/{rest}")
def create_branch(hub, request, repo, branch):
    refs = hub.repos[repo]["refs"]
    known = branch in refs
    refs.setdefault(branch, refs["main"])
    request.answer({"error": "Reference exists"} if known else {}, 409 if known else 201)


@route("POST", "/api/models/{repo}/preupload/{rest}")
def preupload(hub, request, repo, revision):
    _, present = hub.files(repo, revision)
    answers = []
    for file in request.json["files"]:
        path = file["path"]
        oid = digest(path, present[path]) if path in present else None
        mode = "lfs" if is_large(path) else "regular"
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    request.answer({"files": answers})


@route("POST", r"/{repo}\.git/info/lfs/objects/batch")
def announce_large_files(hub, request, repo):
    objects = []
    for file in request.json["objects"]:
        upload = (
            {} if file["oid"] in hub.blobs else {"actions": {"upload": {"href": f"{request.base}/lfs/{file['oid']}"}}}
        )
        objects.append({"oid": file["oid"], "size": file["size"], **upload})
    request.answer({"transfer": "basic", "objects": objects}, ctype="application/vnd.git-lfs+json")


@route("PUT", "/lfs/([0-9a-f]{64})")
def put_large_file(hub, request, oid):
    whole = hashlib.sha256(request.body).hexdigest() == oid
    if whole:
        hub.blobs[oid] = request.body
    request.answer({}, 200 if whole else 400)


@route("POST", "/api/models/{repo}/commit/{rest}")
def commit(hub, request, repo, branch):
    files, message = dict(hub.files(repo, branch)[1]), None
    for line in request.body.decode().splitlines():
        operation = json.loads(line)
        key, value = operation["key"], operation["value"]
        if key == "header":
            message = value["summary"]
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = hub.blobs[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
    oid = hub.commit(repo, branch, files, message)
    request.answer(
        {"success": True, "commitOid": oid, "commitUrl": f"{request.base}/{repo}/commit/{oid}", "hookOutput": ""}
    )


@route("GET", "/api/models/{repo}/tree/([^/]+)")
def tree(hub, request, repo, revision):
    _, files = hub.files(repo, revision)
    entries = []
    for path, data in files.items():
        large = {"lfs": {"oid": digest(path, data), "size": len(data), "pointerSize": 130}} if is_large(path) else {}
        entries.append({"type": "file", "path": path, "size": len(data), "oid": digest(path, data), **large})
    request.answer(entries)


@route("GET", "/api/models/{repo}(?:/revision/(.+))?")
def model_info(hub, request, repo, revision):
    oid, files = hub.files(repo, revision or "main")
    siblings = [{"rfilename": path} for path in files]
    request.answer({"_id": "0", "id": repo, "modelId": repo, "sha": oid, "private": False, "siblings": siblings})


@route("GET", "/{repo}/resolve/([^/]+)/{rest}")
def read_file(hub, request, repo, revision, path):
    oid, files = hub.files(repo, revision)
    if path not in files:
        return request.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
    tag = f'"{digest(path, files[path])}"'
    size = {"X_Linked_Size": str(len(files[path])), "X_Linked_Etag": tag} if is_large(path) else {}
    request.answer(files[path], ctype="application/octet-stream", ETag=tag, X_Repo_Commit=oid, **size)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def log_message(self, *args):
        pass

    def answer(self, content, status=200, ctype="application/json", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": ctype, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    @property
    def json(self):
        return json.loads(self.body)

    def handle_any(self):
        self.body, self.base = self.read_body(), f"http://{self.headers['Host']}"
        path, method = unquote(urlsplit(self.path).path), self.command.replace("HEAD", "GET")
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            if method == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid username or password."}, 401)
            for allowed, pattern, function in ROUTES:
                if allowed == method and (match := pattern.fullmatch(path)):
                    try:
                        return function(self.hub, self, *match.groups())
                    except Missing as missing:
                        return self.answer({"error": "Not found"}, 404, X_Error_Code=str(missing))
            return self.answer({"error": f"{self.command} {path} is not something this Hub knows"}, 501)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any


def serve():
    """A running Hub: its state, its address, and the server to shut down."""
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return hub, f"http://127.0.0.1:{server.server_port}", server
