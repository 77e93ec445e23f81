use super::meet::PAUSE;
use super::*;

/// Ranks of a group that meets on a free port of this machine.
fn group(size: usize) -> Vec<Rendezvous> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..size).map(|rank| Rendezvous { rank, size, address: format!("127.0.0.1:{port}") }).collect()
}

/// What each rank does, side by side.
fn all<T: Send>(ranks: &[Rendezvous], work: impl Fn(&Rendezvous) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_has_the_values_of_all() {
    for size in 2..5 {
        let rounds = all(&group(size), |at| {
            let comm = Tcp::meet(at).unwrap();
            assert_eq!((comm.rank(), comm.size()), (at.rank, size));
            comm.agree("text", b"the same").unwrap();
            let mut sums = Vec::new();
            for round in 0..40 {
                // Of another length each, and of none.
                let own: Vec<f32> = (0..(at.rank * round) % 97).map(|i| (i + round) as f32 + 0.5).collect();
                let parts = comm.all_gather(&own).unwrap();
                assert_eq!(*parts[at.rank], *own);
                assert!(parts.iter().enumerate().all(|(rank, part)| part.len() == (rank * round) % 97));
                let mut sum = vec![0.1 * at.rank as f32, f32::MAX, -0.0, f32::MIN_POSITIVE / 8.0];
                comm.all_reduce(&mut sum).unwrap();
                sums.extend(sum.into_iter().map(f32::to_bits));
            }
            sums
        });
        assert!(rounds.iter().all(|sums| *sums == rounds[0]));
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_all() {
    let leave = |at: &Rendezvous, how: usize| {
        let comm = Tcp::meet(at).unwrap();
        comm.all_gather(&[1.0]).unwrap();
        match (at.rank, how) {
            (2, 0) => drop(comm),
            (2, 1) => comm.leave("has no memory left"),
            (0, 2) => drop(comm),
            _ => return comm.all_gather(&[2.0]).map(drop),
        }
        Ok(())
    };
    for (how, (gone, what)) in [(2, "has ended"), (2, "has no memory left"), (0, "has ended")].into_iter().enumerate() {
        let ends = all(&group(3), |at| leave(at, how));
        for (rank, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
            let error = end.unwrap_err().to_string();
            assert_eq!(error, format!("rank {gone} {what}"), "rank {rank}");
        }
    }
}

#[test]
fn ranks_that_do_not_belong_together_are_refused() {
    let ends = all(&group(3), |at| {
        let comm = Tcp::meet(at).unwrap();
        comm.agree("model", if at.rank == 2 { b"other" } else { b"model" })
    });
    assert!(ends.iter().all(|end| end.as_ref().unwrap_err().to_string() == "rank 2 has another model than rank 0"));
    // Ranks that are at other calls do not take one thing for the other.
    let ends = all(&group(2), |at| {
        let comm = Tcp::meet(at).unwrap();
        match at.rank {
            0 => comm.agree("text", b"the same"),
            _ => comm.agree("model", b"the same"),
        }
    });
    let error = ends[0].as_ref().unwrap_err().to_string();
    assert_eq!(error, "rank 1 does something else, where rank 0 compares the text of all");
    assert!(ends[1].as_ref().unwrap_err().to_string().starts_with("rank 0 does something else"));
    // A rank that counts others, one whose number is taken, and something that is no rank; the right one comes last.
    let ranks = group(2);
    let ends = std::thread::scope(|scope| {
        let first = scope.spawn(|| Tcp::meet(&ranks[0]));
        let mut stranger = loop {
            match TcpStream::connect(&ranks[0].address) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        stranger.write_all(b"GET / HTTP/1.1\r\nHost: halfbyte\r\n\r\n").unwrap();
        let many = Tcp::meet(&Rendezvous { size: 3, rank: 2, ..ranks[1].clone() });
        let right = Tcp::meet(&ranks[1]);
        [first.join().unwrap(), right, many].map(|end| end.map(drop).map_err(|why| why.to_string()))
    });
    assert!(ends[0].is_ok() && ends[1].is_ok(), "{ends:?}");
    let error = ends[2].as_ref().unwrap_err();
    assert!(error.contains("one of 3 ranks") && error.contains("one of 2 ranks"), "{error}");
}

/// Values that were not asked for yet do not hide what comes behind them, and are there when they are asked for.
#[test]
fn a_look_sees_behind_values_that_wait() {
    let ends = all(&group(2), |at| {
        let comm = Tcp::meet(at).unwrap();
        if at.rank == 1 {
            // What it sends for a round that rank 0 has not come to.
            let sent = comm.links().iter().try_for_each(|link| link.send(Kind::Values, 0, &1.0f32.to_le_bytes()));
            sent.unwrap();
            comm.leave("has no memory left");
            return String::new();
        }
        let begun = Instant::now();
        loop {
            if let Err(why) = comm.look() {
                return why.to_string();
            }
            assert!(begun.elapsed() < SILENCE);
            std::thread::sleep(PAUSE);
        }
    });
    assert_eq!(ends[0], "rank 1 has no memory left");
}

/// Who computes something else meanwhile sees it too, without waiting, and what is on its way stays there.
#[test]
fn a_look_finds_who_has_left() {
    let ends = all(&group(3), |at| {
        let comm = Tcp::meet(at).unwrap();
        comm.all_gather(&[1.0]).unwrap();
        comm.look().unwrap();
        if at.rank == 2 {
            std::thread::sleep(BEAT + LOOK);
            // Values that nobody asks for yet are no reason to go.
            return comm.look().map(|()| drop(comm));
        }
        let begun = Instant::now();
        loop {
            comm.look()?;
            assert!(begun.elapsed() < SILENCE);
            std::thread::sleep(PAUSE);
        }
    });
    ends[2].as_ref().unwrap();
    for end in &ends[..2] {
        assert_eq!(end.as_ref().unwrap_err().to_string(), "rank 2 has ended");
    }
    let parts = all(&group(2), |at| {
        let comm = Tcp::meet(at).unwrap();
        std::thread::sleep(BEAT * at.rank as u32);
        (0..20).try_for_each(|_| comm.look()).unwrap();
        comm.all_gather(&[at.rank as f32; 3]).unwrap()
    });
    assert_eq!(*parts[0][1], [1.0; 3]);
    assert_eq!(*parts[1][0], [0.0; 3]);
}
