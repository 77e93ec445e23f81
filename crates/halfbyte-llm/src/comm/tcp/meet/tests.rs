use super::super::Tcp;
use super::*;
use crate::comm::Comm;
use std::io::Write;
use std::thread::{scope, sleep};

const SHORT: Patience = Patience { meet: Duration::from_millis(1500), hello: Duration::from_millis(400) };

fn open() -> (TcpListener, Rendezvous) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, Rendezvous { rank: 1, size: 2, address })
}

/// Rank 0 of two, and rank 1 that comes once strangers are there.
fn meet_beside(patience: Patience, strangers: impl FnOnce(&str) -> Vec<TcpStream>) -> (Result<usize>, Duration) {
    let (listener, at) = open();
    scope(|threads| {
        let first = threads.spawn(|| {
            let begun = Instant::now();
            (accept(&listener, 2, patience).map(|links| links.len()), begun.elapsed())
        });
        let there = strangers(&at.address);
        let second = connect(&at, patience);
        let ended = first.join().unwrap();
        drop(there);
        assert_eq!(second.is_ok(), ended.0.is_ok(), "{second:?}");
        ended
    })
}

#[test]
fn strangers_that_say_nothing_keep_nobody_waiting() {
    let silent = |address: &str| (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    let (met, took) = meet_beside(SHORT, silent);
    assert_eq!(met.unwrap(), 1);
    assert!(took < SHORT.meet, "{took:?}");
    // More than are listened to at once.
    let many = |address: &str| (0..MOST_NEWCOMERS + 9).map(|_| TcpStream::connect(address).unwrap()).collect();
    let (met, _) = meet_beside(PATIENCE, many);
    assert_eq!(met.unwrap(), 1);
}

#[test]
fn a_stranger_that_drips_bytes_is_let_go_in_time() {
    let (listener, at) = open();
    scope(|threads| {
        let first = threads.spawn(|| accept(&listener, 2, SHORT).map(|links| links.len()));
        let mut stranger = TcpStream::connect(&at.address).unwrap();
        let (begun, mut head) = (Instant::now(), [0; 16]);
        (head[0], head[9]) = (Kind::Hello as u8, 2);
        let drip = head.iter().cycle().find(|byte| {
            sleep(Duration::from_millis(25));
            stranger.write_all(&[**byte]).is_err() || begun.elapsed() > SHORT.meet
        });
        assert!(drip.is_some() && begun.elapsed() < SHORT.meet, "{:?}", begun.elapsed());
        connect(&at, SHORT).unwrap();
        assert_eq!(first.join().unwrap().unwrap(), 1);
    });
}

/// Also where what listens is no rank 0: silent, or come late.
#[test]
fn a_start_ends_within_its_bound_on_every_rank() {
    let (listener, at) = open();
    let begun = Instant::now();
    let error = connect(&at, SHORT).unwrap_err().to_string();
    assert!(error.starts_with("rank 0 has not said at 127.0.0.1:") && error.contains("for 1 s"), "{error}");
    assert!(begun.elapsed() < SHORT.meet + SHORT.hello * 2, "{:?}", begun.elapsed());
    drop(listener);
    let begun = Instant::now();
    let error = scope(|threads| {
        threads.spawn(|| {
            sleep(SHORT.meet - SHORT.hello);
            let _late = TcpListener::bind(&at.address).unwrap();
            sleep(SHORT.meet);
        });
        let error = connect(&at, SHORT).unwrap_err().to_string();
        assert!(begun.elapsed() < SHORT.meet + SHORT.hello * 2, "{:?}", begun.elapsed());
        error
    });
    assert!(error.contains("has not said"), "{error}");
    // Rank 0 tells why it did not take the one that came.
    let (listener, at) = open();
    let (first, second) = scope(|threads| {
        let first = threads.spawn(|| accept(&listener, 2, SHORT).map(drop).unwrap_err().to_string());
        let second = connect(&Rendezvous { size: 3, ..at }, SHORT).map(drop).unwrap_err().to_string();
        (first.join().unwrap(), second)
    });
    assert!(first.contains("rank 1 has not come to") && first.contains("came as rank 1 was refused"), "{first}");
    assert!(first.contains("one of 3 ranks") && second.contains("one of 3 ranks"), "{first}; {second}");
}

#[test]
fn messages_must_come_as_fast_as_they_are_long() {
    let patience = Duration::from_millis(200);
    let (listener, at) = open();
    let mut to = TcpStream::connect(&at.address).unwrap();
    let (from, _) = listener.accept().unwrap();
    scope(|threads| {
        let dripping = threads.spawn(|| super::super::read(&from, 1 << 33, patience));
        let mut head = [0; 16];
        (head[0], head[12]) = (Kind::Values as u8, 1);
        to.write_all(&head).unwrap();
        let begun = Instant::now();
        while !dripping.is_finished() {
            assert!(begun.elapsed() < patience * 20);
            drop(to.write_all(&[1]));
            sleep(Duration::from_millis(10));
        }
        let error = dripping.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("has sent only") && error.contains("bytes of a message"), "{error}");
    });
}

#[test]
fn a_port_that_another_has_is_named() {
    let (_listener, at) = open();
    let error = Tcp::meet(&Rendezvous { rank: 0, ..at.clone() }).map(|comm| comm.size()).unwrap_err();
    assert!(matches!(&error, Error::Listen { address, .. } if *address == at.address), "{error}");
}

#[test]
fn variables_of_launchers_are_read() {
    let of = |all: &[(&str, &str)]| {
        let all: Vec<(String, String)> = all.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Rendezvous::from_variables(move |name| all.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    };
    let all = [("WORLD_SIZE", "4"), ("RANK", "3"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "29500")];
    assert_eq!(of(&all).unwrap(), Some(Rendezvous { rank: 3, size: 4, address: "[::1]:29500".into() }));
    assert_eq!(of(&[]).unwrap(), None);
    assert_eq!(of(&[("WORLD_SIZE", "1")]).unwrap(), None);
    for (i, wrong) in [(0, "four"), (0, ""), (0, "0"), (1, "4"), (1, "-1"), (2, ""), (3, "0"), (3, "70000")] {
        let mut all = all;
        all[i].1 = wrong;
        assert!(of(&all).unwrap_err().to_string().contains(all[i].0), "{}={wrong}", all[i].0);
    }
    for missing in 1..4 {
        let some: Vec<_> = all.iter().enumerate().filter(|(i, _)| *i != missing).map(|(_, pair)| *pair).collect();
        assert!(of(&some).unwrap_err().to_string().contains(all[missing].0));
    }
    // torchrun itself listens at the port that it names.
    for (agent, port, want) in [("True", "29500", "29501"), ("False", "29500", "29500"), ("True", "65535", "65534")] {
        let all = [all[0], all[1], all[2], ("MASTER_PORT", port), ("TORCHELASTIC_USE_AGENT_STORE", agent)];
        assert_eq!(of(&all).unwrap().unwrap().address, format!("[::1]:{want}"));
    }
}
