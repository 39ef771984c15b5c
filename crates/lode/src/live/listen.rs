//! Taking an address to listen on, and giving it back.
//!
//! A server that was killed leaves its socket's file behind, to which nobody can connect: it is removed on the way. One that
//! somebody listens on stays, and so does a file that is no socket.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::address::Address;

/// An address that is this process's.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, OwnSocket),
}

/// The file of a socket; removed when this goes.
#[derive(Debug)]
pub struct OwnSocket {
    path: PathBuf,
    /// Device and inode: another's in its place is left alone.
    identity: (u64, u64),
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|about| (about.dev(), about.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    /// Listens, without blocking. The message on failure says what to do.
    pub fn open(address: &Address) -> Result<Listener, String> {
        let about = |e: io::Error| format!("cannot listen on {address}: {}", remedy(&e, address));
        match address {
            Address::Tcp(text) => {
                let listener = TcpListener::bind(text.as_str()).map_err(about)?;
                listener.set_nonblocking(true).map_err(about)?;
                Ok(Listener::Tcp(listener))
            }
            Address::Unix(path) => unix(path).map_err(about),
        }
    }

    /// What others connect to.
    pub fn address(&self) -> Address {
        match self {
            Listener::Tcp(listener) => Address::Tcp(
                listener.local_addr().map_or_else(|_| "?".to_owned(), |address| address.to_string()),
            ),
            Listener::Unix(_, socket) => Address::Unix(socket.path.clone()),
        }
    }
}

fn unix(path: &Path) -> io::Result<Listener> {
    // The server's working directory is another one later.
    let path = std::path::absolute(path)?;
    let bound = match UnixListener::bind(&path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_stale(&path)? => {
            fs::remove_file(&path)?;
            UnixListener::bind(&path)
        }
        other => other,
    };
    let listener = bound?;
    let about = fs::symlink_metadata(&path)?;
    let socket = OwnSocket { path, identity: (about.dev(), about.ino()) };
    listener.set_nonblocking(true)?;
    Ok(Listener::Unix(listener, socket))
}

fn is_stale(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path)?.file_type().is_socket() {
        true => Ok(!is_alive(path)),
        false => Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket")),
    }
}

/// False where certainly nobody listens. Does not wait.
pub fn is_alive(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    !matches!(connect(), Err(Errno::CONNREFUSED | Errno::NOENT))
}

fn remedy(e: &io::Error, address: &Address) -> String {
    let advice = match (e.kind(), address) {
        (io::ErrorKind::AddrInUse, Address::Tcp(_)) => "choose another port, or unix:PATH",
        (io::ErrorKind::AddrInUse, Address::Unix(_)) => "another server listens there: choose another path",
        (io::ErrorKind::AlreadyExists, _) => "remove it, or choose another path",
        (io::ErrorKind::AddrNotAvailable, _) => "name an address of this machine",
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "choose a port above 1023",
        (io::ErrorKind::PermissionDenied, Address::Unix(_)) => "choose a directory that is yours",
        (io::ErrorKind::NotFound, Address::Unix(_)) => "make its directory first",
        (_, Address::Tcp(_)) => "write HOST:PORT of this machine, or unix:PATH",
        (_, Address::Unix(_)) => "choose another path, of at most 107 bytes",
    };
    format!("{e}; {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("lode-listen-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn what_a_killed_server_left_is_replaced() {
        let dir = dir("stale");
        let path = dir.join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists() && !is_alive(&path));
        let listener = Listener::open(&Address::Unix(path.clone())).unwrap();
        assert!(is_alive(&path));
        let said = Listener::open(&Address::Unix(path.clone())).unwrap_err();
        assert!(said.contains("choose another path"), "{said}");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "kept").unwrap();
        let said = Listener::open(&Address::Unix(path.clone())).unwrap_err();
        assert!(said.contains("no socket"), "{said}");
        assert_eq!(fs::read(&path).unwrap(), b"kept");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_socket_of_another_stays() {
        let dir = dir("other");
        let path = dir.join("s");
        let listener = Listener::open(&Address::Unix(path.clone())).unwrap();
        fs::rename(&path, dir.join("moved")).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_port_in_use_is_named() {
        let first = Listener::open(&Address::Tcp("127.0.0.1:0".to_owned())).unwrap();
        let said = Listener::open(&first.address()).unwrap_err();
        assert!(said.contains(&first.address().to_string()) && said.contains("another port"), "{said}");
        let long = Address::Unix(PathBuf::from(format!("/tmp/{}", "x".repeat(200))));
        assert!(Listener::open(&long).unwrap_err().contains("107 bytes"));
    }
}
