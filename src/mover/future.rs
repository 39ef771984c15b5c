//! Tickets as futures, for whatever executor.
//!
//! ```
//! # use lodestone::media::{Addr, Span, SpanOptions};
//! # use lodestone::mover::EngineKind;
//! # use lodestone::mover::copies::{Copies, CopyOptions};
//! # use lodestone::mover::profile::Profile;
//! async fn both(copies: &Copies, a: Vec<u8>, b: Vec<u8>) -> lodestone::Result<(Vec<u8>, Vec<u8>)> {
//!     let options = CopyOptions { durable: true, ..CopyOptions::default() };
//!     let first = copies.submit_to_media(Addr(0), a, &options);
//!     let second = copies.submit_to_media(Addr(1 << 20), b, &options);
//!     let ((a, copied), (b, also)) = (first.await, second.await);
//!     copied?;
//!     also?;
//!     Ok((a, b))
//! }
//! ```
//!
//! Waking is `ticket`'s: by the engine where it rings, by whoever else sees the end, or by an alarm. A future that is
//! dropped leaves no waker and no alarm behind. One that owns a buffer then waits for its copy, as its ticket does.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::copies::Copied;
use super::ticket::{RawTicket, Ticket};
use crate::error::Result;
use crate::media::{Media, Span};

/// Of a [`RawTicket`]: how the copy ended.
#[must_use = "futures do nothing unless they are polled"]
pub struct Ended<M: Media = Span>(RawTicket<M>);

impl<M: Media> Future for Ended<M> {
    type Output = Result<Copied>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Copied>> {
        self.0.poll_with(context)
    }
}

impl<M: Media> IntoFuture for RawTicket<M> {
    type Output = Result<Copied>;
    type IntoFuture = Ended<M>;

    fn into_future(self) -> Ended<M> {
        Ended(self)
    }
}

/// Of a [`Ticket`]: the buffer, and how the copy ended.
#[must_use = "dropped, it waits for the copy"]
pub struct Returned<B, M: Media = Span>(Option<Ticket<B, M>>);

impl<B, M: Media> Future for Returned<B, M> {
    type Output = (B, Result<Copied>);

    /// Panics where it was ready before.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<(B, Result<Copied>)> {
        ready!(self.0.as_ref().expect("a future is not polled after its end").poll_with(context));
        let ticket = self.0.take().expect("it was there just now");
        Poll::Ready(ticket.wait())
    }
}

impl<B, M: Media> IntoFuture for Ticket<B, M> {
    type Output = (B, Result<Copied>);
    type IntoFuture = Returned<B, M>;

    fn into_future(self) -> Returned<B, M> {
        Returned(Some(self))
    }
}
