//! Asking a mount server after its state.

use std::io;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};

use super::address::Address;
use super::state::State;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Largest answer, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Asks one server, again and again.
pub struct Client {
    address: Address,
    runtime: Runtime,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Unanswered {
    /// Nobody is there, or whoever is does not answer, or hung up before the end of it.
    Silent(io::Error),
    /// Somebody else than a mount server.
    Stranger(String),
}

impl Client {
    pub fn new(address: Address) -> io::Result<Client> {
        Ok(Client { address, runtime: Builder::new_current_thread().enable_io().enable_time().build()? })
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns after 5 s at the latest.
    pub fn state(&self) -> Result<State, Unanswered> {
        let asked = async { tokio::time::timeout(PATIENCE, self.ask()).await };
        self.runtime.block_on(asked).unwrap_or_else(|_| {
            let late = format!("no answer within {} s", PATIENCE.as_secs());
            Err(Unanswered::Silent(io::Error::new(io::ErrorKind::TimedOut, late)))
        })
    }

    async fn ask(&self) -> Result<State, Unanswered> {
        match &self.address {
            Address::Tcp(text) => {
                fetch(TcpStream::connect(text.as_str()).await.map_err(Unanswered::Silent)?).await
            }
            Address::Unix(path) => fetch(UnixStream::connect(path).await.map_err(Unanswered::Silent)?).await,
        }
    }
}

async fn fetch<S>(stream: S) -> Result<State, Unanswered>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(unanswered)?;
    // It ends with the request's sender.
    tokio::spawn(connection);
    let request = Request::get("/state").header(HOST, "localhost").body(Empty::<Bytes>::new());
    let response = sender.send_request(request.expect("a constant request")).await.map_err(unanswered)?;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(Unanswered::Stranger(format!("the answer is {status}")));
    }
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|e| match e.downcast::<hyper::Error>() {
        Ok(e) => unanswered(*e),
        Err(e) => Unanswered::Stranger(e.to_string()),
    });
    serde_json::from_slice(&body?.to_bytes()).map_err(|e| Unanswered::Stranger(e.to_string()))
}

fn unanswered(e: hyper::Error) -> Unanswered {
    if e.is_parse() {
        return Unanswered::Stranger(e.to_string());
    }
    Unanswered::Silent(io::Error::new(io::ErrorKind::ConnectionReset, format!("it hung up ({e})")))
}
