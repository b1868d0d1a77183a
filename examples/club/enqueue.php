<?php
// Register a person: php enqueue.php 7 'Ada Lovelace' ada@example.org
declare(strict_types=1);

const REGISTER = <<<'SQL'
    INSERT INTO registration (number, name, email)
    VALUES (:number, :name, :email)
    ON CONFLICT (number) DO UPDATE SET name = EXCLUDED.name, email = EXCLUDED.email
    SQL;

const ENQUEUE = <<<'SQL'
    SELECT
        m.mail,
        pgoutbox.enqueue(
            'mail.registration',
            jsonb_build_object('registration', r.number, 'mail', m.mail),
            queue => 'mail',
            dedupe_key => r.number || ':' || m.mail,
            on_duplicate => 'ignore',
            owner => 'registration-' || r.number,
            max_attempts => 10
        ) AS message
    FROM registration AS r
    CROSS JOIN (VALUES ('member'), ('organiser')) AS m (mail)
    WHERE r.number = :number
    SQL;

/** Register a person. The registration never fails because of its mails. */
function register(PDO $db, int $number, string $name, string $email): void
{
    $db->beginTransaction();
    $db->prepare(REGISTER)->execute(['number' => $number, 'name' => $name, 'email' => $email]);
    $db->exec('SAVEPOINT mail');
    try {
        $db->exec('SELECT pgoutbox.lock_for_enqueue()');
        $db->prepare(ENQUEUE)->execute(['number' => $number]);
        $db->exec('RELEASE SAVEPOINT mail');
    } catch (PDOException $error) {
        $db->exec('ROLLBACK TO SAVEPOINT mail');
        error_log("registration $number has no mails: " . $error->getMessage());
    }
    $db->commit();
}

[, $number, $name, $email] = $argv;
// The data source and the password of your web host, such as pgsql:host=db.example.org;dbname=club
$db = new PDO(getenv('CLUB_PDO'), getenv('CLUB_PDO_USER'), getenv('CLUB_PDO_PASSWORD'), [
    PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION,
]);
register($db, (int) $number, $name, $email);
