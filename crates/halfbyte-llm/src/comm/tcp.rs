//! Ranks that are processes, on one host or several: rank 0 gathers what all send, and sends it to all.
//!
//! For being right, not for speed. A connection carries frames: a kind, a number, a length, and so many bytes.
//!
//! ```text
//! hello   rank → 0    version, number of ranks, rank        0 → rank    nothing, or why the rank is refused
//! values  rank → 0    its own                               0 → rank    those of all, each with its length
//! left    either      why a rank has left, and which        beat        nothing: the process lives
//! ```

use super::Comm;
use crate::error::{Error, Result};
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

const OP: &str = "ranks over TCP";

/// How long ranks wait for each other at the beginning.
const MEET: Duration = Duration::from_secs(25);

/// How often a process says that it lives, and after how long without a word it is given up.
const BEAT: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(20);

/// How long a look at a connection takes at most.
const LOOK: Duration = Duration::from_millis(1);

/// Between two tries to connect, or to accept.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection that says nothing is heard at the beginning; and how much it may say.
const HELLO: Duration = Duration::from_secs(3);
const MOST_OF_HELLO: u64 = 1 << 10;

/// Values of a rank at most.
const MOST_BYTES: u64 = 1 << 34;

/// Other programs than this one, and other versions of it, are refused.
const VERSION: &str = concat!("halfbyte ", env!("CARGO_PKG_VERSION"));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hello = 1,
    Values = 2,
    Left = 3,
    Beat = 4,
}

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
    /// Error: a variable that is missing, or is no number that it may be.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name: &str, value: &str| {
            value.parse::<usize>().map_err(|_| Error::invalid(OP, format!("a number in {name}"), value.to_owned()))
        };
        let Some(size) = variable("WORLD_SIZE") else { return Ok(None) };
        let size = number("WORLD_SIZE", &size)?;
        if size == 1 {
            return Ok(None);
        }
        let given =
            |name: &str| variable(name).ok_or_else(|| Error::invalid(OP, format!("the variable {name}"), "none"));
        let rank = number("RANK", &given("RANK")?)?;
        if rank >= size {
            return Err(Error::invalid(OP, format!("a RANK below WORLD_SIZE, {size}"), rank.to_string()));
        }
        let (host, port) = (given("MASTER_ADDR")?, number("MASTER_PORT", &given("MASTER_PORT")?)?);
        if !(1..1 << 16).contains(&port) {
            return Err(Error::invalid(OP, "a MASTER_PORT from 1 to 65535", port.to_string()));
        }
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(Some(Self { rank, size, address: format!("{host}:{port}") }))
    }
}

/// A process that shares a model with others.
#[derive(Debug)]
pub struct Tcp {
    rank: usize,
    size: usize,
    /// To rank 0; of rank 0 to all others, in their order.
    links: Mutex<Vec<Link>>,
    /// What ends the thread that says that this process lives.
    beating: Option<(Sender<()>, JoinHandle<()>)>,
}

/// A connection to a rank.
#[derive(Debug)]
struct Link {
    rank: usize,
    from: TcpStream,
    /// The thread that says that this process lives writes too.
    to: Arc<Mutex<TcpStream>>,
    /// Rounds of values so far.
    round: u32,
    /// When the rank was last heard of.
    heard: Instant,
}

fn lost(rank: usize, why: impl Display) -> Error {
    Error::Rank { rank, what: why.to_string() }
}

/// Rank 0 cannot hear others at an address.
fn unheard(address: &str, why: &io::Error) -> Error {
    Error::invalid(OP, format!("an address to be found at, {address}"), why.to_string())
}

fn write(to: &mut TcpStream, kind: Kind, number: u32, bytes: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(16 + bytes.len());
    frame.extend((kind as u32).to_le_bytes());
    frame.extend(number.to_le_bytes());
    frame.extend((bytes.len() as u64).to_le_bytes());
    frame.extend(bytes);
    to.write_all(&frame)
}

fn read(from: &mut TcpStream, most: u64) -> io::Result<(Kind, u32, Vec<u8>)> {
    let mut head = [0u8; 16];
    from.read_exact(&mut head)?;
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let kinds = [Kind::Hello, Kind::Values, Kind::Left, Kind::Beat];
    let kind = kinds.into_iter().find(|&kind| kind as u32 == word(0));
    let len = u64::from(word(8)) | u64::from(word(12)) << 32;
    let Some(kind) = kind.filter(|_| len <= most) else {
        return Err(io::Error::new(ErrorKind::InvalidData, "something else than a rank of halfbyte says"));
    };
    let mut bytes = Vec::new();
    // As it comes: what is announced is not believed.
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, word(4), bytes))
}

/// Why nothing came from a rank.
fn reason(why: &io::Error) -> String {
    match why.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("has said nothing for {} s", SILENCE.as_secs()),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "has ended".to_owned(),
        _ => why.to_string(),
    }
}

impl Link {
    fn new(rank: usize, stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Self { rank, to: Arc::new(Mutex::new(stream.try_clone()?)), from: stream, round: 0, heard: Instant::now() })
    }

    fn send(&self, kind: Kind, number: u32, bytes: &[u8]) -> Result<()> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        write(&mut to, kind, number, bytes).map_err(|why| lost(self.rank, reason(&why)))
    }

    /// Takes what says that the rank lives. Error: it has left, or has said nothing for long.
    fn look(&mut self) -> Result<()> {
        let gone = |rank: usize| move |why: io::Error| lost(rank, reason(&why));
        loop {
            let mut head = [0; 16];
            self.from.set_read_timeout(Some(LOOK)).map_err(gone(self.rank))?;
            let seen = self.from.peek(&mut head);
            self.from.set_read_timeout(Some(SILENCE)).map_err(gone(self.rank))?;
            match seen {
                Ok(0) => return Err(lost(self.rank, reason(&ErrorKind::UnexpectedEof.into()))),
                Ok(16) if head[0] == Kind::Beat as u8 => {
                    read(&mut self.from, 0).map_err(gone(self.rank))?;
                    self.heard = Instant::now();
                }
                Ok(16) if head[0] == Kind::Left as u8 => return self.values().map(drop),
                // Values wait for their turn.
                Ok(_) => return Ok(()),
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return if self.heard.elapsed() > SILENCE { Err(lost(self.rank, reason(&why))) } else { Ok(()) };
                }
                Err(why) => return Err(lost(self.rank, reason(&why))),
            }
        }
    }

    /// The values of the next round.
    fn values(&mut self) -> Result<Vec<u8>> {
        loop {
            let (kind, number, bytes) =
                read(&mut self.from, MOST_BYTES).map_err(|why| lost(self.rank, reason(&why)))?;
            self.heard = Instant::now();
            match kind {
                Kind::Beat => {}
                Kind::Left => {
                    return Err(lost(number as usize, String::from_utf8_lossy(&bytes)));
                }
                Kind::Values if number == self.round => {
                    self.round = self.round.wrapping_add(1);
                    return Ok(bytes);
                }
                Kind::Values | Kind::Hello => return Err(lost(self.rank, "is at another step than this rank")),
            }
        }
    }
}

impl Tcp {
    /// Meets the other ranks. Errors: a rank that does not come within 25 s, that is of another program or version, that counts other
    /// ranks, or whose number another one has.
    pub fn meet(at: &Rendezvous) -> Result<Self> {
        match at.rank {
            0 => Self::lead(TcpListener::bind(&at.address).map_err(|why| unheard(&at.address, &why))?, at.size),
            _ => Ok(Self::of(at.rank, at.size, vec![Self::connect(at)?])),
        }
    }

    /// Rank 0 of so many, which the others find at an address that is open already. Errors: those of [`Tcp::meet`].
    pub fn lead(listener: TcpListener, size: usize) -> Result<Self> {
        Ok(Self::of(0, size, Self::accept(&listener, size)?))
    }

    fn of(rank: usize, size: usize, links: Vec<Link>) -> Self {
        let writers: Vec<_> = links.iter().map(|link| link.to.clone()).collect();
        let (end, ended) = channel();
        let beat = Builder::new().name("halfbyte-beat".into()).spawn(move || beat(&writers, &ended));
        let beating = beat.ok().map(|thread| (end, thread));
        Self { rank, size, links: Mutex::new(links), beating }
    }

    fn accept(listener: &TcpListener, size: usize) -> Result<Vec<Link>> {
        let address = listener.local_addr().map_or_else(|_| "its address".to_owned(), |address| address.to_string());
        listener.set_nonblocking(true).map_err(|why| unheard(&address, &why))?;
        let (until, mut links) = (Instant::now() + MEET, Vec::<Link>::new());
        while links.len() + 1 < size {
            match listener.accept() {
                Ok((stream, _)) => {
                    // Others than ranks may knock.
                    if let Ok(Some(link)) = Self::welcome(stream, size, &links) {
                        links.push(link);
                    }
                }
                Err(why) if why.kind() == ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
                Err(why) => return Err(unheard(&address, &why)),
            }
            if Instant::now() > until {
                let came = |rank: &usize| *rank == 0 || links.iter().any(|link| link.rank == *rank);
                let missing = (0..size).find(|rank| !came(rank)).unwrap_or(0);
                let why = format!("has not come to {address} within {} s", MEET.as_secs());
                let gone = lost(missing, &why);
                links.iter().for_each(|link| drop(link.send(Kind::Left, missing as u32, why.as_bytes())));
                return Err(gone);
            }
        }
        links.sort_by_key(|link| link.rank);
        // All are there.
        links.iter().try_for_each(|link| link.send(Kind::Hello, 0, &[]))?;
        Ok(links)
    }

    /// A connection, if it is that of a rank which is still missing.
    fn welcome(stream: TcpStream, size: usize, known: &[Link]) -> io::Result<Option<Link>> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(HELLO))?;
        let mut stream = stream;
        let (kind, rank, hello) = read(&mut stream, MOST_OF_HELLO)?;
        let rank = rank as usize;
        let expected = hello_of(size);
        let refusal = if kind != Kind::Hello || hello != expected.as_bytes() {
            Some(format!("is \"{}\", and rank 0 \"{expected}\"", String::from_utf8_lossy(&hello)))
        } else if rank == 0 || rank >= size {
            Some(format!("is none of {size} ranks"))
        } else if known.iter().any(|link| link.rank == rank) {
            Some("is there already".to_owned())
        } else {
            None
        };
        match refusal {
            None => Link::new(rank, stream).map(Some),
            Some(why) => write(&mut stream, Kind::Left, rank as u32, why.as_bytes()).map(|()| None),
        }
    }

    fn connect(at: &Rendezvous) -> Result<Link> {
        let until = Instant::now() + MEET;
        let stream = loop {
            let addresses = at.address.to_socket_addrs().map(Vec::from_iter);
            let tried = addresses.and_then(|all| {
                let first = all.first().ok_or_else(|| io::Error::from(ErrorKind::NotFound))?;
                TcpStream::connect_timeout(first, HELLO)
            });
            match tried {
                Ok(stream) => break stream,
                Err(why) if Instant::now() > until => {
                    let what = format!("is not to be had at {} for {} s: {why}", at.address, MEET.as_secs());
                    return Err(lost(0, what));
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        let gone = |why: io::Error| lost(0, reason(&why));
        let mut link = Link::new(0, stream).map_err(gone)?;
        link.from.set_read_timeout(Some(MEET + HELLO)).map_err(gone)?;
        link.send(Kind::Hello, at.rank as u32, hello_of(at.size).as_bytes())?;
        let (kind, rank, text) = read(&mut link.from, MOST_OF_HELLO).map_err(gone)?;
        link.from.set_read_timeout(Some(SILENCE)).map_err(gone)?;
        match kind {
            Kind::Hello => Ok(link),
            _ => Err(lost(rank as usize, String::from_utf8_lossy(&text))),
        }
    }

    fn links(&self) -> MutexGuard<'_, Vec<Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of rank 0: the values of all, which it tells all.
    fn gather(&self, links: &mut [Link], own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let round = links.first().map_or(0, |link| link.round);
        let parts = links.iter_mut().map(Link::values).collect::<Result<Vec<_>>>();
        let told = parts.and_then(|parts| {
            let all: Vec<Vec<u8>> = std::iter::once(own.to_vec()).chain(parts).collect();
            let mut joined = Vec::new();
            for part in &all {
                joined.extend((part.len() as u64).to_le_bytes());
                joined.extend(part);
            }
            links.iter().try_for_each(|link| link.send(Kind::Values, round, &joined))?;
            Ok(all)
        });
        self.pass_on(links, &told);
        told
    }

    /// Rank 0 tells all of a rank that has left.
    fn pass_on<T>(&self, links: &[Link], told: &Result<T>) {
        if let (0, Err(Error::Rank { rank, what })) = (self.rank, told) {
            links.iter().for_each(|link| drop(link.send(Kind::Left, *rank as u32, what.as_bytes())));
        }
    }
}

fn hello_of(size: usize) -> String {
    format!("{VERSION}, one of {size} ranks")
}

/// Says to others that this process lives, until it is told to end.
fn beat(writers: &[Arc<Mutex<TcpStream>>], ended: &Receiver<()>) {
    while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
        for to in writers {
            // One that is being written to hears of this process anyway.
            if let Ok(mut to) = to.try_lock() {
                drop(write(&mut to, Kind::Beat, 0, &[]));
            }
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.beating.take() {
            drop(end);
            drop(thread.join());
        }
    }
}

impl Comm for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, values: &[f32]) -> Result<Vec<Arc<[f32]>>> {
        let own: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut links = self.links();
        let all = if self.rank == 0 {
            self.gather(&mut links, &own)?
        } else {
            let Some(link) = links.first_mut() else { return Err(lost(0, "has ended")) };
            link.send(Kind::Values, link.round, &own)?;
            let joined = link.values()?;
            split(&joined).filter(|all| all.len() == self.size).ok_or_else(|| lost(0, "says what no rank 0 says"))?
        };
        let floats =
            |bytes: &Vec<u8>| bytes.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]])).collect();
        Ok(all.iter().map(floats).collect())
    }

    fn leave(&self, why: &str) {
        let rank = self.rank as u32;
        self.links().iter().for_each(|link| drop(link.send(Kind::Left, rank, why.as_bytes())));
    }

    fn look(&self) -> Result<()> {
        let mut links = self.links();
        let looked = links.iter_mut().try_for_each(Link::look);
        self.pass_on(&links, &looked);
        looked
    }
}

/// Parts, each behind its length.
fn split(mut joined: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    while let Some((len, rest)) = joined.split_first_chunk::<8>() {
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        parts.push(rest.get(..len)?.to_vec());
        joined = &rest[len..];
    }
    joined.is_empty().then_some(parts)
}

#[cfg(test)]
mod tests;
