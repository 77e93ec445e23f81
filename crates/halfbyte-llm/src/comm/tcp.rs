//! Ranks that are processes, on one host or several: rank 0 gathers what all send, and sends it to all.
//!
//! For being right, not for speed. A connection carries frames: a kind, a number, a length, and so many bytes.
//!
//! ```text
//! hello   rank → 0    version, number of ranks, rank        0 → rank    nothing, or why the rank is refused
//! values  rank → 0    its own                               0 → rank    those of all, each with its length
//! left    either      why a rank has left, and which        beat        nothing: the process lives
//! ```

mod meet;

pub use meet::Rendezvous;

use super::Comm;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How often a process says that it lives, and after how long without a word it is given up.
const BEAT: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(20);

/// How long a look at a connection takes at most.
const LOOK: Duration = Duration::from_millis(1);

/// Values of a rank at most.
const MOST_BYTES: u64 = 1 << 34;

/// Bytes a second that a message brings at least, once it has taken [`SILENCE`].
const LEAST_BYTES_A_SECOND: u64 = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hello = 1,
    Values = 2,
    Left = 3,
    Beat = 4,
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
    /// Values that came before they were asked for, with their rounds.
    waiting: VecDeque<(u32, Vec<u8>)>,
}

/// Values that may wait: of the next round, and of one more.
const MOST_WAITING: usize = 2;

fn lost(rank: usize, why: impl Display) -> Error {
    Error::Rank { rank, what: why.to_string() }
}

fn write(mut to: impl Write, kind: Kind, number: u32, bytes: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(16 + bytes.len());
    frame.extend((kind as u32).to_le_bytes());
    frame.extend(number.to_le_bytes());
    frame.extend((bytes.len() as u64).to_le_bytes());
    frame.extend(bytes);
    to.write_all(&frame)
}

/// Kind, number and length of a frame. Error: no frame, or a longer one.
fn head_of(head: [u8; 16], most: u64) -> io::Result<(Kind, u32, u64)> {
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let kinds = [Kind::Hello, Kind::Values, Kind::Left, Kind::Beat];
    let kind = kinds.into_iter().find(|&kind| kind as u32 == word(0));
    let len = u64::from(word(8)) | u64::from(word(12)) << 32;
    let no_rank = || io::Error::new(ErrorKind::InvalidData, "does not speak as a rank of halfbyte does");
    kind.filter(|_| len <= most).map(|kind| (kind, word(4), len)).ok_or_else(no_rank)
}

/// A frame, of which nothing keeps a reader longer than it is long.
fn read(from: impl Read, most: u64, patience: Duration) -> io::Result<(Kind, u32, Vec<u8>)> {
    let mut from = Paced { from, patience, begun: None, bytes: 0 };
    let mut head = [0; 16];
    from.read_exact(&mut head)?;
    let (kind, number, len) = head_of(head, most)?;
    let mut bytes = Vec::new();
    // As it comes: what is announced is not believed.
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, number, bytes))
}

/// Bytes that come fast enough, from the first one on.
struct Paced<R> {
    from: R,
    patience: Duration,
    begun: Option<Instant>,
    bytes: u64,
}

impl<R: Read> Read for Paced<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let since = self.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let least = since.saturating_sub(self.patience).as_secs_f64() * LEAST_BYTES_A_SECOND as f64;
        if least > self.bytes as f64 {
            let what = format!("has sent only {} bytes of a message in {} s", self.bytes, since.as_secs());
            return Err(io::Error::new(ErrorKind::InvalidData, what));
        }
        let read = self.from.read(to)?;
        self.begun.get_or_insert_with(Instant::now);
        self.bytes += read as u64;
        Ok(read)
    }
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
        let to = Arc::new(Mutex::new(stream.try_clone()?));
        Ok(Self { rank, to, from: stream, round: 0, heard: Instant::now(), waiting: VecDeque::new() })
    }

    fn send(&self, kind: Kind, number: u32, bytes: &[u8]) -> Result<()> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        write(&mut *to, kind, number, bytes).map_err(|why| lost(self.rank, reason(&why)))
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
                // Values wait for their turn, so that what comes behind them is seen.
                Ok(16) => self.take_frame()?,
                // A part of a frame.
                Ok(_) if self.heard.elapsed() > SILENCE => {
                    return Err(lost(self.rank, reason(&ErrorKind::TimedOut.into())));
                }
                Ok(_) => return Ok(()),
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return if self.heard.elapsed() > SILENCE { Err(lost(self.rank, reason(&why))) } else { Ok(()) };
                }
                Err(why) => return Err(lost(self.rank, reason(&why))),
            }
        }
    }

    /// Reads what comes next; values wait. Errors: the rank has left or ended, or sends what it should not.
    fn take_frame(&mut self) -> Result<()> {
        let (kind, number, bytes) =
            read(&mut self.from, MOST_BYTES, SILENCE).map_err(|why| lost(self.rank, reason(&why)))?;
        self.heard = Instant::now();
        match kind {
            Kind::Beat => {}
            Kind::Left => return Err(lost(number as usize, String::from_utf8_lossy(&bytes))),
            Kind::Values if self.waiting.len() < MOST_WAITING => self.waiting.push_back((number, bytes)),
            Kind::Values | Kind::Hello => return Err(self.elsewhere()),
        }
        Ok(())
    }

    /// The values of the next round.
    fn values(&mut self) -> Result<Vec<u8>> {
        loop {
            match self.waiting.pop_front() {
                Some((number, bytes)) if number == self.round => {
                    self.round = self.round.wrapping_add(1);
                    return Ok(bytes);
                }
                Some(_) => return Err(self.elsewhere()),
                None => self.take_frame()?,
            }
        }
    }

    fn elsewhere(&self) -> Error {
        lost(self.rank, "is at another step than this rank")
    }
}

impl Tcp {
    /// Meets the other ranks. Errors: a rank that does not come within 25 s, that is of another program or version, that counts other
    /// ranks, or whose number another one has; an address at which rank 0 cannot listen.
    pub fn meet(at: &Rendezvous) -> Result<Self> {
        match at.rank {
            0 => Self::lead(meet::listen(&at.address)?, at.size),
            _ => Ok(Self::of(at.rank, at.size, vec![meet::connect(at, meet::PATIENCE)?])),
        }
    }

    /// Rank 0 of so many, which the others find at an address that is open already. Errors: those of [`Tcp::meet`].
    pub fn lead(listener: TcpListener, size: usize) -> Result<Self> {
        Ok(Self::of(0, size, meet::accept(&listener, size, meet::PATIENCE)?))
    }

    fn of(rank: usize, size: usize, links: Vec<Link>) -> Self {
        let writers: Vec<_> = links.iter().map(|link| link.to.clone()).collect();
        let (end, ended) = channel();
        let beat = Builder::new().name("halfbyte-beat".into()).spawn(move || beat(&writers, &ended));
        let beating = beat.ok().map(|thread| (end, thread));
        Self { rank, size, links: Mutex::new(links), beating }
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

/// Says to others that this process lives, until it is told to end.
fn beat(writers: &[Arc<Mutex<TcpStream>>], ended: &Receiver<()>) {
    while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
        for to in writers {
            // One that is being written to hears of this process anyway.
            if let Ok(mut to) = to.try_lock() {
                drop(write(&mut *to, Kind::Beat, 0, &[]));
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
