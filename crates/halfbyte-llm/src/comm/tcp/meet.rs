//! How ranks that are processes find each other: rank 0 listens, and the others come to it.
//!
//! Anybody may come to a port. A connection has a bound in total within which it must have said which rank it is, all that have not
//! yet said so are listened to at once, and the start as a whole has a bound too, on every rank.

use super::{Kind, Link, head_of, lost, reason, write};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Other programs than this one, and other versions of it, are refused.
const VERSION: &str = concat!("halfbyte ", env!("CARGO_PKG_VERSION"));

/// Between two tries to connect, or to accept.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// How long a look at a connection takes that has said nothing yet.
const LOOK: Duration = Duration::from_millis(10);

/// What a connection may say before it is known which rank it is; and how many such there may be: of more the first is dropped.
const MOST_OF_HELLO: u64 = 1 << 10;
const MOST_NEWCOMERS: usize = 256;

/// How long ranks wait at the beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For each other.
    pub meet: Duration,
    /// For a connection to say which rank it is.
    pub hello: Duration,
}

pub(super) const PATIENCE: Patience = Patience { meet: Duration::from_secs(25), hello: Duration::from_secs(3) };

/// Where ranks meet, and who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank's number.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Host and port of rank 0.
    pub address: String,
}

impl Rendezvous {
    /// By the variables that launchers set: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. None: WORLD_SIZE is not set, or there is one rank.
    /// Where TORCHELASTIC_USE_AGENT_STORE is True, torchrun itself listens at MASTER_PORT, and ranks meet at the next port (behind the last
    /// one at the one before). Error: a variable that is missing, or is no number that it may be.
    pub fn from_env() -> Result<Option<Self>> {
        // What is no text is none of the values that are asked for, and refused as such.
        Self::from_variables(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let refuse = |variable: &'static str, expected: String, got: &str| {
            let got = if got.is_empty() { "nothing" } else { got };
            Error::Launcher { variable, expected, got: got.to_owned() }
        };
        let number = |name: &'static str, value: &str| {
            value.parse::<usize>().map_err(|_| refuse(name, "a whole number".to_owned(), value))
        };
        let Some(size) = variable("WORLD_SIZE") else { return Ok(None) };
        let size = match number("WORLD_SIZE", &size)? {
            0 => return Err(refuse("WORLD_SIZE", "at least 1".to_owned(), "0")),
            1 => return Ok(None),
            size => size,
        };
        let given = |name: &'static str| {
            variable(name)
                .filter(|value| !value.is_empty())
                .ok_or_else(|| refuse(name, "a value, as WORLD_SIZE has one".to_owned(), "nothing"))
        };
        let rank = number("RANK", &given("RANK")?)?;
        if rank >= size {
            return Err(refuse("RANK", format!("less than WORLD_SIZE, {size}"), &rank.to_string()));
        }
        let (host, port) = (given("MASTER_ADDR")?, number("MASTER_PORT", &given("MASTER_PORT")?)?);
        if !(1..1 << 16).contains(&port) {
            return Err(refuse("MASTER_PORT", "1 to 65535".to_owned(), &port.to_string()));
        }
        let port = match variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() {
            Some("True") if port == 65_535 => port - 1,
            Some("True") => port + 1,
            _ => port,
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(Some(Self { rank, size, address: format!("{host}:{port}") }))
    }
}

/// Rank 0 listens. Error: it cannot, as when another program has the port.
pub(super) fn listen(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|source| Error::Listen { address: address.to_owned(), source })
}

fn hello_of(size: usize) -> String {
    format!("{VERSION}, one of {size} ranks")
}

/// A connection that has not yet said what it has to.
struct Newcomer {
    stream: TcpStream,
    since: Instant,
    bytes: Vec<u8>,
}

impl Newcomer {
    /// Of a stream that keeps nobody waiting.
    fn new(stream: TcpStream) -> Self {
        Self { stream, since: Instant::now(), bytes: Vec::new() }
    }

    /// Its first frame; None: not all of it has come yet. Error: it has ended, or says something else.
    fn hear(&mut self) -> io::Result<Option<(Kind, u32, Vec<u8>)>> {
        loop {
            let frame = self.bytes.first_chunk().map(|head| head_of(*head, MOST_OF_HELLO)).transpose()?;
            let want = frame.map_or(16, |(.., len)| 16 + len as usize);
            if let Some((kind, number, _)) = frame.filter(|_| self.bytes.len() == want) {
                return Ok(Some((kind, number, self.bytes.split_off(16))));
            }
            let mut more = [0; 16 + MOST_OF_HELLO as usize];
            match self.stream.read(&mut more[..want - self.bytes.len()]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.bytes.extend(&more[..read]),
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(None),
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
    }
}

/// Waits for all ranks but the first; gives their connections in order.
pub(super) fn accept(listener: &TcpListener, size: usize, patience: Patience) -> Result<Vec<Link>> {
    let address = listener.local_addr().map_or_else(|_| "its address".to_owned(), |address| address.to_string());
    let unheard = |source: io::Error| Error::Listen { address: address.clone(), source };
    listener.set_nonblocking(true).map_err(unheard)?;
    let until = Instant::now() + patience.meet;
    let (mut links, mut newcomers, mut refused) = (Vec::<Link>::new(), VecDeque::<Newcomer>::new(), None);
    while links.len() + 1 < size {
        let mut nobody = false;
        while !nobody && newcomers.len() < MOST_NEWCOMERS {
            match listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        newcomers.push_back(Newcomer::new(stream));
                    }
                }
                Err(why) if why.kind() == ErrorKind::WouldBlock => nobody = true,
                // It has gone before it was taken.
                Err(why) if matches!(why.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(why) => return Err(unheard(why)),
            }
        }
        for _ in 0..newcomers.len() {
            let Some(mut newcomer) = newcomers.pop_front() else { break };
            // Others than ranks may knock.
            match newcomer.hear() {
                Ok(Some(frame)) => match welcome(newcomer.stream, frame, size, &links) {
                    Ok(Ok(link)) => links.push(link),
                    Ok(Err(refusal)) => refused = Some(refusal),
                    Err(_) => {}
                },
                Ok(None) if newcomer.since.elapsed() < patience.hello => newcomers.push_back(newcomer),
                Ok(None) | Err(_) => {}
            }
        }
        if newcomers.len() >= MOST_NEWCOMERS {
            newcomers.pop_front();
        }
        if Instant::now() > until {
            let came = |rank: &usize| *rank == 0 || links.iter().any(|link| link.rank == *rank);
            let missing = (0..size).find(|rank| !came(rank)).unwrap_or(0);
            let mut why = format!("has not come to {address} within {} s", patience.meet.as_secs());
            if let Some((rank, refusal)) = refused {
                why += &format!("; one that came as rank {rank} was refused: it {refusal}");
            }
            links.iter().for_each(|link| drop(link.send(Kind::Left, missing as u32, why.as_bytes())));
            return Err(lost(missing, &why));
        }
        if nobody && links.len() + 1 < size {
            std::thread::sleep(if newcomers.is_empty() { PAUSE } else { LOOK });
        }
    }
    links.sort_by_key(|link| link.rank);
    // All are there.
    links.iter().try_for_each(|link| link.send(Kind::Hello, 0, &[]))?;
    Ok(links)
}

/// A connection that has said who it is, if it is a rank which is still missing; else the number that it gave, and why it is refused, which
/// it is told.
fn welcome(
    stream: TcpStream,
    (kind, rank, hello): (Kind, u32, Vec<u8>),
    size: usize,
    known: &[Link],
) -> io::Result<std::result::Result<Link, (usize, String)>> {
    stream.set_nonblocking(false)?;
    let rank = rank as usize;
    let expected = hello_of(size);
    let refusal = if kind != Kind::Hello || hello != expected.as_bytes() {
        format!("is \"{}\", and rank 0 \"{expected}\"", String::from_utf8_lossy(&hello))
    } else if rank == 0 || rank >= size {
        format!("is none of {size} ranks")
    } else if known.iter().any(|link| link.rank == rank) {
        "is there already".to_owned()
    } else {
        return Link::new(rank, stream).map(Ok);
    };
    stream.set_write_timeout(Some(LOOK))?;
    // Whether it hears of it or not.
    drop(write(&stream, Kind::Left, rank as u32, refusal.as_bytes()));
    Ok(Err((rank, refusal)))
}

/// Goes to rank 0, and waits until all have come.
pub(super) fn connect(at: &Rendezvous, patience: Patience) -> Result<Link> {
    let until = Instant::now() + patience.meet;
    let stream = loop {
        match reach(&at.address, patience.hello) {
            Ok(stream) => break stream,
            Err(why) if Instant::now() > until => {
                let what = format!("is not to be had at {} for {} s: {why}", at.address, patience.meet.as_secs());
                return Err(lost(0, what));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    };
    let until = until + patience.hello;
    let gone = |why: io::Error| lost(0, reason(&why));
    let heard = stream.try_clone().and_then(|stream| stream.set_read_timeout(Some(LOOK)).map(|()| stream));
    let mut newcomer = Newcomer::new(heard.map_err(gone)?);
    write(&stream, Kind::Hello, at.rank as u32, hello_of(at.size).as_bytes()).map_err(gone)?;
    let (kind, rank, text) = loop {
        match newcomer.hear().map_err(gone)? {
            Some(frame) => break frame,
            None if Instant::now() > until => {
                let whole = patience.meet + patience.hello;
                let what = format!("has not said at {} that all have come, for {} s", at.address, whole.as_secs());
                return Err(lost(0, what));
            }
            None => {}
        }
    };
    match kind {
        Kind::Hello => Link::new(0, stream).map_err(gone),
        _ => Err(lost(rank as usize, String::from_utf8_lossy(&text))),
    }
}

/// A connection to one of an address's hosts.
fn reach(address: &str, patience: Duration) -> io::Result<TcpStream> {
    let mut last = ErrorKind::NotFound.into();
    for host in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&host, patience) {
            Ok(stream) => return Ok(stream),
            Err(why) => last = why,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
