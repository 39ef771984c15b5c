//! HTTP for those who ask after a mount: `GET /metrics` and `GET /state`.
//!
//! One thread serves all listeners, and sleeps in the kernel while nobody asks. Who connects gets one answer and is hung up
//! on. A client cannot make it hang or grow: requests have a size, connections a time and a number, and where that is
//! reached the oldest one is dropped for the newest, because the oldest is the one that says nothing.
//!
//! The mount does not wait for this thread, and it does not keep the pool open: its end comes with that of [`Server`].

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::address::Address;
use super::listen::{Listener, OwnSocket, is_alive};
use super::metrics;
use super::place::{self, Identity, Which};
use super::state::Source;

/// How long a client may take to say what it wants.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// And until it has its answer.
const CONNECTION_TIME: Duration = Duration::from_secs(10);
/// Largest request, in bytes, without a body: nobody reads that.
const REQUEST_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// Connections at a time.
const CONNECTIONS_MAX: usize = 64;
/// What a runtime opens, at most.
const RUNTIME_DESCRIPTORS: usize = 8;
/// When the process has no descriptor left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listeners that nobody answers on yet.
pub struct Listening {
    runtime: Runtime,
    listeners: Vec<Listener>,
}

impl Listening {
    /// On none yet.
    pub fn new() -> io::Result<Listening> {
        enough_descriptors()?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        Ok(Listening { runtime, listeners: Vec::new() })
    }

    /// The message on failure says what to do.
    pub fn open(&mut self, address: &Address) -> Result<(), String> {
        self.listeners.push(Listener::open(address)?);
        Ok(())
    }

    /// The socket by which `lode top` finds the server of a pool (`place`), and away with those that killed servers of the
    /// same pool left.
    pub fn open_for_pool(&mut self, pool: &Path, minor: Option<u32>) -> Result<(), String> {
        let about = |e: io::Error| format!("no socket for lode top: {e}");
        let identity = Identity::of(pool).map_err(about)?;
        let dir = place::make().map_err(about)?;
        for left in place::sockets(&dir, Which::OfPool(identity)).into_iter().filter(|left| !is_alive(left)) {
            let _ = std::fs::remove_file(left);
        }
        self.open(&Address::Unix(dir.join(place::name(pool, identity, minor))))
    }

    /// What others connect to.
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.iter().map(|listener| listener.address().to_string()).collect()
    }

    /// Answers from now on, on a thread of its own.
    pub fn serve(self, source: Arc<dyn Source>) -> io::Result<Server> {
        let Listening { runtime, listeners } = self;
        let connections = Connections::default();
        let mut sockets = Vec::new();
        for listener in listeners {
            let _entered = runtime.enter();
            match listener {
                Listener::Tcp(tcp) => {
                    let listener = TcpListener::from_std(tcp)?;
                    let (source, connections) = (Arc::clone(&source), connections.clone());
                    runtime.spawn(async move {
                        loop {
                            connections
                                .take(listener.accept().await.map(|(stream, _)| stream), &source)
                                .await;
                        }
                    });
                }
                Listener::Unix(unix, socket) => {
                    sockets.push(socket);
                    let listener = UnixListener::from_std(unix)?;
                    let (source, connections) = (Arc::clone(&source), connections.clone());
                    runtime.spawn(async move {
                        loop {
                            connections
                                .take(listener.accept().await.map(|(stream, _)| stream), &source)
                                .await;
                        }
                    });
                }
            }
        }
        let (stop, stopped) = oneshot::channel::<()>();
        // Both ends of it are an end: that it was sent, and that its sender has gone. What is being served ends with the
        // runtime.
        thread::Builder::new().name("live".to_owned()).spawn(move || runtime.block_on(stopped))?;
        Ok(Server { _stop: stop, _sockets: sockets })
    }
}

/// Fails where there are too few left for a runtime: making one would panic.
fn enough_descriptors() -> io::Result<()> {
    let mut taken = Vec::new();
    for _ in 0..RUNTIME_DESCRIPTORS.div_ceil(2) {
        taken.push(UnixStream::pair()?);
    }
    Ok(())
}

/// Answers until it is dropped. That does not wait.
pub struct Server {
    _stop: oneshot::Sender<()>,
    _sockets: Vec<OwnSocket>,
}

/// Those that are open, the oldest first.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<VecDeque<AbortHandle>>>);

impl Connections {
    async fn take<S>(&self, accepted: io::Result<S>, source: &Arc<dyn Source>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match accepted {
            Ok(stream) => self.keep(tokio::spawn(serve(stream, Arc::clone(source))).abort_handle()),
            Err(error) => {
                tracing::debug!(%error, "a client cannot be let in");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    fn keep(&self, connection: AbortHandle) {
        let mut open = self.0.lock().expect("nobody panics with it");
        open.retain(|connection| !connection.is_finished());
        while open.len() >= CONNECTIONS_MAX {
            open.pop_front().expect("there are some").abort();
        }
        open.push_back(connection);
    }
}

async fn serve<S>(stream: S, source: Arc<dyn Source>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let response = answer(&request, source.as_ref());
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME)
        .max_buf_size(REQUEST_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // A client that goes away, or that is too slow, is not our concern.
    let _ = tokio::time::timeout(CONNECTION_TIME, connection).await;
}

fn answer(request: &Request<Incoming>, source: &dyn Source) -> Response<Full<Bytes>> {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refused = said(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let (content_type, render): (_, fn(&super::state::State) -> String) = match request.uri().path() {
        "/metrics" => (metrics::CONTENT_TYPE, metrics::render),
        "/state" => ("application/json", |state| {
            serde_json::to_string(state).expect("our documents have string keys only")
        }),
        _ => return said(StatusCode::NOT_FOUND, "there are /metrics and /state\n"),
    };
    let Some(state) = source.state() else {
        return said(StatusCode::SERVICE_UNAVAILABLE, "the pool is being unmounted\n");
    };
    respond(StatusCode::OK, content_type, render(&state))
}

fn said(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    respond(status, "text/plain; charset=utf-8", text.to_owned())
}

fn respond(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
