/*
HTTP for `sample --serve`, from one thread: libevent's evhttp parses and writes, this file bounds and checks. It gives
each good request to HttpServer.take; the answer may come at any later time.

    http_open      listens on an address and a port, but takes no connection yet
    http_begin     allows connections
    http_poll      reads and writes what is ready
    http_left      tells whether the client of a request has gone
    http_reply     answers with one text
    http_stream    begins an answer of events; http_event adds one, http_end ends it
    http_drop      ends a request without an answer, and its connection
    http_close     waits until answers are written, and ends all connections

It takes GET, and POST with Content-Type application/json, of bounded size, whose Host is this server. No answer allows
another origin, so a page in a browser can neither ask nor read. A connection is closed if its client has sent no whole
request, or has taken no byte of its answer, for HTTP_PATIENCE. If all connections are taken, further clients wait in
the system's queue, and the connection that has been without a request for longest is closed.
*/
#ifndef LLMC_HTTP_H
#define LLMC_HTTP_H
#include "llmc/base/json.h"
#include "llmc/base/text.h"
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>
#include <event2/util.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define HTTP_HEADERS  16384 // most bytes of a request's headers
#define HTTP_OTHERS   64    // descriptors besides connections
#define HTTP_PATIENCE 30.0  // seconds for a whole request, for a client that reads nothing, and between two requests
#define HTTP_IDLE     1.0   // seconds without a request after which a connection may make room for another
#define HTTP_TICK     0.2   // most seconds of a poll that waits
#define HTTP_TOKEN    32    // least bytes of a token

// A connection
typedef struct {
    // We hold a reference. When libevent ends the connection it clears the callbacks; http_sweep sees that. The buffers
    // then close the descriptor, after their events: nobody gets its number before
    struct bufferevent *buffers;
    size_t unread; // bytes that its client has not taken yet
    double since;  // when it opened, when its last answer was written, or when its client took bytes
    int answers;   // 1: a request of it is being answered
} HttpPeer;

typedef struct evhttp_request HttpRequest;
typedef struct HttpServer HttpServer;

struct HttpServer {
    struct event_base *base;
    struct evhttp *http;
    struct event *tick; // wakes a poll that waits after HTTP_TICK
    struct evconnlistener *listener;
    char name[256]; // address as given
    size_t port;
    int local, any;    // local: only this machine reaches the address; any: the address means all of this machine's
    const char *token; // NULL: none is asked for
    HttpPeer *peer;    // [most_peers]
    size_t peers, most_peers;
    // Takes a request: text[bytes], then a zero, or NULL for GET. It must be answered or dropped
    void (*take)(void *context, HttpRequest *request, const char *path, const char *text, size_t bytes);
    void *context;
};

// ---- connections ----------------------------------------------------------------------------------------------------
// Marks the connection of a request: from now on, its request is being answered, or it may send the next one.
static void http_mark(HttpServer *server, HttpRequest *request, int answers) {
    struct evhttp_connection *connection = evhttp_request_get_connection(request);
    for (size_t i = 0; i < server->peers && connection; i++)
        if (server->peer[i].buffers == evhttp_connection_get_bufferevent(connection))
            server->peer[i].answers = answers, server->peer[i].since = seconds_now();
}

// Takes the end of an answer, after its last byte was written (evhttp_request_set_on_complete_cb).
static void http_answered(HttpRequest *request, void *context) { http_mark((HttpServer *)context, request, 0); }

// Makes the buffers of a new connection (evhttp_set_bevcb).
static struct bufferevent *http_connected(struct event_base *base, void *context) {
    HttpServer *server = (HttpServer *)context;
    const HttpPeer peer = {bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE), 0, seconds_now(), 0};
    if (!peer.buffers) return NULL;
    bufferevent_incref(peer.buffers);
    server->peer[server->peers++] = peer;
    if (server->peers == server->most_peers) evconnlistener_disable(server->listener);
    return peer.buffers;
}

static size_t http_unread(const HttpPeer *peer) { return evbuffer_get_length(bufferevent_get_output(peer->buffers)); }

// Forgets connections that libevent has closed, and ends connections that took too long. libevent's own limit would
// begin anew with every part of an answer.
static void http_sweep(HttpServer *server) {
    const double now = seconds_now();
    size_t left = 0, idle = SIZE_MAX;
    for (size_t i = 0; i < server->peers; i++) {
        HttpPeer peer = server->peer[i];
        const size_t unread = http_unread(&peer);
        bufferevent_event_cb open;
        bufferevent_getcb(peer.buffers, NULL, NULL, &open, NULL);
        if (!open) {
            bufferevent_decref(peer.buffers);
            continue;
        }
        if (peer.answers && (!unread || unread < peer.unread)) peer.since = now;
        if (now - peer.since > HTTP_PATIENCE) shutdown(bufferevent_getfd(peer.buffers), SHUT_RDWR);
        if (!peer.answers && (idle == SIZE_MAX || peer.since < server->peer[idle].since)) idle = left;
        server->peer[left++] = peer;
    }
    server->peers = left;
    if (left < server->most_peers)
        evconnlistener_enable(server->listener);
    else if (idle != SIZE_MAX && now - server->peer[idle].since > HTTP_IDLE)
        shutdown(bufferevent_getfd(server->peer[idle].buffers), SHUT_RDWR);
}

// ---- requests -------------------------------------------------------------------------------------------------------
static int http_left(HttpRequest *request) {
    struct evhttp_connection *connection = evhttp_request_get_connection(request);
    if (!connection) return 1;
    struct pollfd end = {bufferevent_getfd(evhttp_connection_get_bufferevent(connection)), POLLRDHUP, 0};
    return poll(&end, 1, 0) > 0 && end.revents & (POLLRDHUP | POLLHUP | POLLERR);
}

static void http_drop(HttpRequest *request) {
    struct evhttp_connection *connection = evhttp_request_get_connection(request);
    if (connection)
        evhttp_connection_free(connection); // and its request
    else
        evhttp_request_free(request);
}

static void http_header(HttpRequest *request, const char *name, const char *value) {
    evhttp_add_header(evhttp_request_get_output_headers(request), name, value);
}

// Answers with text[bytes].
static void http_reply(HttpRequest *request, int status, const char *text, size_t bytes) {
    struct evbuffer *body = evbuffer_new();
    http_header(request, "Content-Type", "application/json");
    http_header(request, "X-Content-Type-Options", "nosniff");
    if (body) evbuffer_add(body, text, bytes);
    evhttp_send_reply(request, status, NULL, body);
    if (body) evbuffer_free(body);
}

// Begins an answer of server-sent events. HTTP/1.0 has no parts: without keep-alive, libevent closes the connection at
// the end of the answer.
static void http_stream(HttpRequest *request) {
    struct evkeyvalq *asked = evhttp_request_get_input_headers(request);
    const char *connection = evhttp_find_header(asked, "Connection");
    if (connection && !strcasecmp(connection, "keep-alive")) evhttp_remove_header(asked, "Connection");
    http_header(request, "Content-Type", "text/event-stream");
    http_header(request, "Cache-Control", "no-cache");
    http_header(request, "X-Content-Type-Options", "nosniff");
    evhttp_send_reply_start(request, HTTP_OK, "OK");
}

// Sends an event, a line of text.
static void http_event(HttpRequest *request, const char *text) {
    struct evbuffer *part = evbuffer_new();
    if (!part) return;
    evbuffer_add_printf(part, "data: %s\n\n", text);
    evhttp_send_reply_chunk(request, part);
    evbuffer_free(part);
}

static void http_end(HttpRequest *request) { evhttp_send_reply_end(request); }

// ---- checks ---------------------------------------------------------------------------------------------------------
// Refuses a request: an error in OpenAI's form. type: "invalid_request_error", for example
static void http_refuse(HttpRequest *request, int status, const char *type, const char *message) {
    char text[2 * DIE_MESSAGE];
    JsonOut json = json_open_text(text, sizeof(text), JSON_LINE);
    json_object(&json, "error");
    json_text(&json, "message", message), json_text(&json, "type", type);
    json_null(&json, "param"), json_null(&json, "code");
    json_object_end(&json);
    http_reply(request, status, text, json_text_end(&json));
}

// Tells whether a Host header means this server: a name of this machine's own, or the name that was given.
static int http_is_host(const HttpServer *server, const char *host) {
    const char *const own[] = {"localhost", "127.0.0.1", "::1", server->name};
    const int bracketed = *host == '[';
    const char *name = host + bracketed, *end = name + strcspn(name, bracketed ? "]" : ":");
    const size_t bytes = (size_t)(end - name);
    size_t port;
    if (bracketed && *end++ != ']') return 0;
    if (*end && (*end != ':' || !parse_size(end + 1, &port))) return 0;
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        if (strlen(own[i]) == bytes && !strncasecmp(name, own[i], bytes)) return 1;
    return server->any; // then a token is asked for
}

// Compares a token in a time that does not depend on where it differs.
static int http_is_token(const char *token, const char *authorization) {
    static const char bearer[] = "Bearer ";
    const size_t bytes = strlen(token);
    unsigned differs = 0;
    if (!authorization || strncasecmp(authorization, bearer, sizeof(bearer) - 1) != 0) return 0;
    authorization += sizeof(bearer) - 1;
    if (strlen(authorization) != bytes) return 0;
    for (size_t i = 0; i < bytes; i++) differs |= (unsigned)(token[i] ^ authorization[i]);
    return !differs;
}

// Takes a request from libevent.
static void http_asked(HttpRequest *request, void *context) {
    static const char json[] = "application/json";
    HttpServer *server = (HttpServer *)context;
    struct evkeyvalq *headers = evhttp_request_get_input_headers(request);
    const char *host = evhttp_find_header(headers, "Host"), *kind = evhttp_find_header(headers, "Content-Type");
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
    const int posts = evhttp_request_get_command(request) == EVHTTP_REQ_POST;
    struct evbuffer *body = evhttp_request_get_input_buffer(request);
    const size_t bytes = evbuffer_get_length(body);
    const char *type = "invalid_request_error";
    http_mark(server, request, 1);
    evhttp_request_set_on_complete_cb(request, http_answered, server);
    if (!host || !http_is_host(server, host)) {
        http_refuse(request, 403, type, "Host is not this server; ask for it by localhost or its --serve name");
    } else if (server->token && !http_is_token(server->token, evhttp_find_header(headers, "Authorization"))) {
        http_refuse(request, 401, type, "no such token; send Authorization: Bearer TOKEN, of --serve-token");
    } else if (posts &&
               (!kind || strncasecmp(kind, json, sizeof(json) - 1) != 0 || !strchr("; \t", kind[sizeof(json) - 1]))) {
        http_refuse(request, 415, type, "Content-Type must be application/json");
    } else if (!posts) {
        server->take(server->context, request, path ? path : "", NULL, 0);
    } else {
        evbuffer_add(body, "", 1);
        const char *text = (const char *)evbuffer_pullup(body, -1);
        if (text)
            server->take(server->context, request, path ? path : "", text, bytes);
        else
            http_refuse(request, 503, "server_error", "out of memory for a request; ask again later");
    }
}

// ---- the server -----------------------------------------------------------------------------------------------------
static void http_silent(int severity, const char *message) { (void)severity, (void)message; }
static void http_ticked(evutil_socket_t fd, short what, void *context) { (void)fd, (void)what, (void)context; }

// Reads the address to which a socket was bound.
static void http_read_bound(HttpServer *server, int fd) {
    struct sockaddr_storage bound = {0};
    const struct sockaddr_in *four = (const struct sockaddr_in *)&bound;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&bound;
    socklen_t size = sizeof(bound);
    getsockname(fd, (struct sockaddr *)&bound, &size);
    const int is_six = bound.ss_family == AF_INET6;
    server->port = ntohs(is_six ? six->sin6_port : four->sin_port);
    server->local = is_six ? IN6_IS_ADDR_LOOPBACK(&six->sin6_addr) : ntohl(four->sin_addr.s_addr) >> 24 == 127;
    server->any = is_six ? IN6_IS_ADDR_UNSPECIFIED(&six->sin6_addr) : four->sin_addr.s_addr == INADDR_ANY;
}

// Listens on `address`, a name or number, and `port`; 0: any free port. Sets port, local and any. A failure ends the
// program.
static void http_open(HttpServer *server, const char *address, size_t port) {
    const struct timeval tick = {0, (suseconds_t)(HTTP_TICK * 1e6)};
    signal(SIGPIPE, SIG_IGN); // a client may leave at any time
    event_set_log_callback(http_silent);
    snprintf(server->name, sizeof(server->name), "%s", address);
    server->base = event_base_new();
    server->http = server->base ? evhttp_new(server->base) : NULL;
    server->tick = server->http ? event_new(server->base, -1, EV_PERSIST, http_ticked, NULL) : NULL;
    if (!server->tick || event_add(server->tick, &tick)) die("--serve: out of host memory; free some memory");
    evhttp_set_allowed_methods(server->http, EVHTTP_REQ_GET | EVHTTP_REQ_POST);
    evhttp_set_max_headers_size(server->http, HTTP_HEADERS);
    evhttp_set_default_content_type(server->http, NULL);
    evhttp_set_bevcb(server->http, http_connected, server);
    evhttp_set_gencb(server->http, http_asked, server);
    errno = 0;
    struct evhttp_bound_socket *socket = evhttp_bind_socket_with_handle(server->http, address, (ev_uint16_t)port);
    if (!socket)
        die("--serve %s:%zu: cannot listen: %s; choose another port or address", address, port,
            errno ? error_text(errno) : "no such address here");
    server->listener = evhttp_bound_socket_get_listener(socket);
    http_read_bound(server, evhttp_bound_socket_get_fd(socket));
}

// Allows `peers` connections, and bodies of at most `most` bytes. The caller has set take, context and token.
static void http_begin(HttpServer *server, size_t peers, size_t most) {
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < peers + HTTP_OTHERS)
        die("--serve needs %zu open files, and the limit is %zu; raise it with ulimit -n, or give fewer --slots",
            peers + HTTP_OTHERS, (size_t)files.rlim_cur);
    evhttp_set_max_body_size(server->http, (ev_ssize_t)most);
    server->peer = (HttpPeer *)checked_calloc(peers, sizeof(HttpPeer), "connections");
    server->most_peers = peers;
}

// Reads and writes what is ready. waits: first until something is ready, at most HTTP_TICK
static void http_poll(HttpServer *server, int waits) {
    for (size_t i = 0; i < server->peers; i++) server->peer[i].unread = http_unread(&server->peer[i]);
    event_base_loop(server->base, waits ? EVLOOP_ONCE : EVLOOP_NONBLOCK);
    http_sweep(server);
}

// Waits until the answers that were given are written, at most HTTP_PATIENCE, and ends.
static void http_close(HttpServer *server) {
    const double until = seconds_now() + HTTP_PATIENCE;
    for (size_t answers = 1; answers && seconds_now() < until;) {
        http_poll(server, 1);
        answers = 0;
        for (size_t i = 0; i < server->peers; i++) answers += (size_t)server->peer[i].answers;
    }
    evhttp_free(server->http);
    for (size_t i = 0; i < server->peers; i++) bufferevent_decref(server->peer[i].buffers);
    free(server->peer);
    event_free(server->tick);
    event_base_free(server->base);
    libevent_global_shutdown();
}

#endif
