//! A channel of bounded length between uthreads, threads, or both: whoever finds it full or empty lets others run.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::wait::Waiter;
use crate::sync::primitive::Mutex;

/// A channel that holds up to `items_max` items, at least one.
pub fn bounded<T>(items_max: usize) -> (Sender<T>, Receiver<T>) {
    let state = State {
        items: VecDeque::new(),
        items_max: items_max.max(1),
        senders: 1,
        receivers: 1,
        sending: VecDeque::new(),
        receiving: VecDeque::new(),
    };
    let channel = Arc::new(Channel(Mutex::new(state)));
    (Sender(channel.clone()), Receiver(channel))
}

struct Channel<T>(Mutex<State<T>>);

struct State<T> {
    items: VecDeque<T>,
    items_max: usize,
    senders: usize,
    receivers: usize,
    sending: VecDeque<Arc<Waiter>>,
    receiving: VecDeque<Arc<Waiter>>,
}

/// The other side is gone: of a sender, with what was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed<T = ()>(pub T);

impl<T> fmt::Display for Closed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the other side of the channel is gone")
    }
}

impl<T: fmt::Debug> std::error::Error for Closed<T> {}

/// Why nothing was sent, with what was to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrySend<T> {
    Full(T),
    Closed(T),
}

/// Why nothing was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryRecv {
    Empty,
    Closed,
}

pub struct Sender<T>(Arc<Channel<T>>);

pub struct Receiver<T>(Arc<Channel<T>>);

impl<T> Sender<T> {
    /// Waits for room. Answers the item where nobody is left to receive it.
    pub fn send(&self, mut item: T) -> Result<(), Closed<T>> {
        loop {
            let waiter = {
                let mut state = self.0.0.lock();
                match state.try_send(item) {
                    Ok(()) => return Ok(()),
                    Err(TrySend::Closed(item)) => return Err(Closed(item)),
                    Err(TrySend::Full(back)) => item = back,
                }
                queue_up(&mut state.sending)
            };
            waiter.wait();
        }
    }

    pub fn try_send(&self, item: T) -> Result<(), TrySend<T>> {
        self.0.0.lock().try_send(item)
    }
}

impl<T> Receiver<T> {
    /// Waits for an item. Fails where none is left and nobody to send one.
    pub fn recv(&self) -> Result<T, Closed> {
        loop {
            let waiter = {
                let mut state = self.0.0.lock();
                match state.try_recv() {
                    Ok(item) => return Ok(item),
                    Err(TryRecv::Closed) => return Err(Closed(())),
                    Err(TryRecv::Empty) => queue_up(&mut state.receiving),
                }
            };
            waiter.wait();
        }
    }

    pub fn try_recv(&self) -> Result<T, TryRecv> {
        self.0.0.lock().try_recv()
    }
}

fn queue_up(queue: &mut VecDeque<Arc<Waiter>>) -> Arc<Waiter> {
    let waiter = Waiter::new();
    queue.push_back(waiter.clone());
    waiter
}

fn wake_first(queue: &mut VecDeque<Arc<Waiter>>) {
    if let Some(waiter) = queue.pop_front() {
        waiter.wake();
    }
}

fn wake_all(queue: &mut VecDeque<Arc<Waiter>>) {
    for waiter in queue.drain(..) {
        waiter.wake();
    }
}

impl<T> State<T> {
    fn try_send(&mut self, item: T) -> Result<(), TrySend<T>> {
        if self.receivers == 0 {
            return Err(TrySend::Closed(item));
        }
        if self.items.len() >= self.items_max {
            return Err(TrySend::Full(item));
        }
        self.items.push_back(item);
        wake_first(&mut self.receiving);
        Ok(())
    }

    fn try_recv(&mut self) -> Result<T, TryRecv> {
        match self.items.pop_front() {
            Some(item) => {
                wake_first(&mut self.sending);
                Ok(item)
            }
            None if self.senders == 0 => Err(TryRecv::Closed),
            None => Err(TryRecv::Empty),
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.0.lock().senders += 1;
        Sender(self.0.clone())
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        self.0.0.lock().receivers += 1;
        Receiver(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.senders -= 1;
        if state.senders == 0 {
            wake_all(&mut state.receiving);
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let items = {
            let mut state = self.0.0.lock();
            state.receivers -= 1;
            if state.receivers > 0 {
                return;
            }
            wake_all(&mut state.sending);
            std::mem::take(&mut state.items)
        };
        // Outside of the lock: an item may be the end of another channel, or of this one.
        drop(items);
    }
}
