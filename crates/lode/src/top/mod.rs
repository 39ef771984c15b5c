//! `lode top`: what goes on in a mounted pool, as its server tells (docs/top.md).
//!
//! `find` makes an address of what was named, `rates` what happened between two looks, `table` makes lines of that, and
//! `screen` shows them until somebody has seen enough.

mod find;
mod rates;
mod screen;
mod table;

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use crate::failure::{Failure, Output, Result};
use crate::live::client::{Client, Unanswered};
use crate::live::state::State;
use rates::Look;

pub struct TopOptions {
    pub target: OsString,
    /// Between two looks.
    pub interval: Duration,
    pub once: bool,
    pub json: bool,
}

pub fn run(options: &TopOptions) -> Result<()> {
    let (client, first) = reach(&options.target)?;
    if options.json {
        let mut out = Output::new();
        out.json(&first)?;
        return out.finish();
    }
    if !options.once && io::stdout().is_terminal() {
        return screen::run(client, first, options.interval);
    }
    std::thread::sleep(options.interval);
    let second = ask(&client)?;
    let mut out = Output::new();
    for line in table::lines(&Look::new(&first, &second)) {
        out.line(line.text())?;
    }
    out.finish()
}

/// How long whoever dies is waited for.
const DEATH: Duration = Duration::from_secs(1);

/// The server of what was named (a mounted pool, a mount point, an address), and what goes on there now.
pub fn reach(target: &OsStr) -> Result<(Client, State)> {
    let began = Instant::now();
    loop {
        let address = find::address(target)?;
        let client = Client::new(address).map_err(|e| Failure::failed(format_args!("cannot ask: {e}")))?;
        match client.state() {
            Ok(state) => return Ok((client, state)),
            // Of a server that dies the socket may be alive for a moment: what is left of it tells more.
            Err(Unanswered::Silent(e))
                if e.kind() != io::ErrorKind::TimedOut
                    && find::is_found(target, client.address())
                    && began.elapsed() < DEATH =>
            {
                std::thread::sleep(DEATH / 50);
            }
            Err(why) => return Err(failure(&client, &why)),
        }
    }
}

/// What goes on there now.
pub fn ask(client: &Client) -> Result<State> {
    client.state().map_err(|why| failure(client, &why))
}

/// Why there is no answer, and what to do.
fn failure(client: &Client, why: &Unanswered) -> Failure {
    let address = client.address();
    match why {
        Unanswered::Silent(e) => Failure::failed(format_args!(
            "no mount server answers on {address}: {e}; name a mounted pool, a mount point, or the address of its --metrics"
        )),
        Unanswered::Stranger(what) => Failure::failed(format_args!(
            "who answers on {address} is no mount server of this version: {what}; name the address of its --metrics"
        )),
    }
}
