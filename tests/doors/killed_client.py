"""Asks for a stream and reads on for ever: a client that only SIGKILL ends.

    python -S -E killed_client.py PORT < BODY

Says "streaming" on stdout once the first token has come. Raw sockets: it starts in milliseconds.
"""

import socket
import sys

body = sys.stdin.buffer.read()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    seen = b""
    while chunk := connection.recv(4096):
        if b"data:" not in seen:
            seen += chunk
            if b"data:" in seen:
                print("streaming", flush=True)
raise SystemExit("the stream ended before the client")
